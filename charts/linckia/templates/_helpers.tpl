{{/*
Every name that the chart gives, and the labels that go with them. KubeRay makes a Role, a RoleBinding and a ServiceAccount with
the RayCluster's own name when it autoscales, so nothing of the chart but the RayCluster may have that name bare.
*/}}

{{- define "linckia.name" -}}
{{- $name := .Values.nameOverride | default .Release.Name -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]{0,45}[a-z0-9])?$" $name) -}}
{{- fail (printf "\n\nnameOverride / release name: %q cannot name a RayCluster: KubeRay takes a letter first, then letters, digits and dashes, at most 47 characters.\nNext: choose another release name, or --set nameOverride=NAME\n" $name) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{- define "linckia.rayCluster" -}}{{ include "linckia.name" . }}{{- end -}}
{{- define "linckia.operator" -}}{{ include "linckia.name" . }}-operator{{- end -}}
{{- define "linckia.headPolicy" -}}{{ include "linckia.name" . }}-head{{- end -}}
{{- define "linckia.rayPolicy" -}}{{ include "linckia.name" . }}-ray{{- end -}}
{{- define "linckia.alerts" -}}{{ include "linckia.name" . }}-alerts{{- end -}}
{{- define "linckia.crd" -}}trainingruns.linckia.dev{{- end -}}

{{- define "linckia.tokenSecret" -}}
{{- .Values.token.existingSecret | default (printf "%s-token" (include "linckia.name" .)) -}}
{{- end -}}

{{/* Admission policies belong to the whole cluster: the namespace is in the name, so that two releases are two policies. */}}
{{- define "linckia.admissionPolicy" -}}{{ .Release.Namespace }}-{{ include "linckia.name" . }}-rayjobs.linckia.dev{{- end -}}

{{/* The RayCluster that the operator looks after; empty for every one in its namespace. */}}
{{- define "linckia.watchedCluster" -}}
{{- if .Values.operator.rayCluster -}}
{{- if ne .Values.operator.rayCluster "*" -}}{{ .Values.operator.rayCluster }}{{- end -}}
{{- else if .Values.rayCluster.enabled -}}
{{ include "linckia.rayCluster" . }}
{{- end -}}
{{- end -}}

{{- define "linckia.labels" -}}
{{ include "linckia.selector" . }}
app.kubernetes.io/part-of: linckia
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "linckia.selector" -}}
app.kubernetes.io/name: linckia
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "linckia.operatorSelector" -}}
{{ include "linckia.selector" . }}
app.kubernetes.io/component: operator
{{- end -}}

{{/* Of a Ray pod. Not app.kubernetes.io/name or created-by: the head Service that KubeRay makes selects by its own values of these. */}}
{{- define "linckia.rayPodLabels" -}}
app.kubernetes.io/part-of: linckia
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* What selects Ray pods: those of the watched RayCluster, or all in the namespace. */}}
{{- define "linckia.raySelector" -}}
{{- $cluster := include "linckia.watchedCluster" . -}}
{{- if $cluster -}}
ray.io/cluster: {{ $cluster }}
{{- else -}}
ray.io/is-ray-node: "yes"
{{- end -}}
{{- end -}}
