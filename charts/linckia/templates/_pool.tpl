{{/* One worker group of the RayCluster. Takes (root, where, options). */}}
{{- define "linckia.pool" -}}
{{- $o := .options -}}
{{- $memory := include "linckia.memory" . | fromYaml -}}
{{- $labels := dict "ray.io/cluster" (include "linckia.rayCluster" .root) "ray.io/group" $o.name -}}
groupName: {{ $o.name }}
{{ include "linckia.replicas" . }}
# Ray's own node labels: what a plan, and what the autoscaler knows of a node before there is one, name a pool by.
labels:
  {{- $rayLabels := dict "linckia.dev/pool" $o.name }}
  {{- if eq (len ($o.zones | default list)) 1 }}{{- $_ := set $rayLabels "ray.io/availability-zone" (first $o.zones) }}{{- end }}
  {{- include "linckia.merge" (dict "base" $rayLabels "over" $o.rayLabels) | nindent 2 }}
rayStartParams:
  {{- $params := dict "object-store-memory" $memory.objectStore "memory" $memory.heap }}
  {{- with $o.rayResources }}
  {{- $_ := set $params "resources" (printf "'%s'" (toJson .)) }}
  {{- end }}
  {{- include "linckia.merge" (dict "base" $params "over" $o.rayStartParams) | nindent 2 }}
template:
  {{- include "linckia.rayPod" (dict "root" .root "kind" "worker" "where" .where "options" $o "podLabels" $labels) | nindent 2 }}
{{- end -}}

{{/*
With autoscaling `replicas` is left out: the autoscaler owns it, and Helm, which replaces the whole list of pools, would take it back on
every upgrade.
*/}}
{{- define "linckia.replicas" -}}
{{- $o := .options -}}
{{- if .root.Values.rayCluster.autoscaling.enabled -}}
{{- if hasKey $o "replicas" -}}
{{- fail (printf "\n\n%s.replicas: %d cannot be set with rayCluster.autoscaling.enabled: the autoscaler decides it.\nNext: set minReplicas and maxReplicas\n" .where (int $o.replicas)) -}}
{{- end -}}
{{- if not (hasKey $o "maxReplicas") -}}
{{- fail (printf "\n\n%s.maxReplicas: missing; autoscaling needs a limit.\nNext: set maxReplicas\n" .where) -}}
{{- end -}}
{{- if gt (int $o.minReplicas) (int $o.maxReplicas) -}}
{{- fail (printf "\n\n%s.minReplicas: %d is above maxReplicas, %d.\nNext: lower it\n" .where (int $o.minReplicas) (int $o.maxReplicas)) -}}
{{- end -}}
minReplicas: {{ int $o.minReplicas }}
maxReplicas: {{ int $o.maxReplicas }}
{{- with $o.idleTimeoutSeconds }}
idleTimeoutSeconds: {{ int . }}
{{- end }}
{{- else -}}
{{- if or (hasKey $o "minReplicas") (hasKey $o "maxReplicas") -}}
{{- fail (printf "\n\n%s.minReplicas, maxReplicas: mean nothing without autoscaling.\nNext: set rayCluster.autoscaling.enabled=true, or replicas in their place\n" .where) -}}
{{- end -}}
{{- $replicas := hasKey $o "replicas" | ternary (int $o.replicas) 1 -}}
replicas: {{ $replicas }}
minReplicas: {{ $replicas }}
maxReplicas: {{ $replicas }}
{{- end -}}
{{- end -}}
