{{/*
The pod template of the head (kind head) or of a pool's workers (kind worker).
Takes (root, kind, where, options): the options are rayCluster.common with the head's or the pool's own merged over it.
*/}}
{{- define "linckia.rayPod" -}}
{{- $o := .options -}}
{{- $generated := include "linckia.rayPodGenerated" . | fromYaml -}}
{{- if hasKey $generated "Error" -}}{{- fail (printf "%s: %s" .where $generated.Error) -}}{{- end -}}
{{- if ge (int $o.drainSeconds) (int $o.terminationGracePeriodSeconds) -}}
{{- fail (printf "\n\n%s.drainSeconds: %d is not below terminationGracePeriodSeconds, %d: Ray would be killed while it drains.\nNext: lower one or raise the other\n" .where (int $o.drainSeconds) (int $o.terminationGracePeriodSeconds)) -}}
{{- end -}}
{{- include "linckia.merge" (dict "base" $generated "over" $o.podTemplate) -}}
{{- end -}}

{{- define "linckia.rayPodGenerated" -}}
{{- $o := .options -}}
{{- $head := eq .kind "head" -}}
{{- $memory := include "linckia.memory" . | fromYaml -}}
metadata:
  labels:
    {{- include "linckia.rayPodLabels" .root | nindent 4 }}
    {{- with $o.labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    # A step in flight is worth more than a node: neither autoscaler moves the pod by itself.
    {{- $keep := dict "cluster-autoscaler.kubernetes.io/safe-to-evict" "false" "karpenter.sh/do-not-disrupt" "true" }}
    {{- include "linckia.merge" (dict "base" $keep "over" $o.annotations) | nindent 4 }}
spec:
  terminationGracePeriodSeconds: {{ int $o.terminationGracePeriodSeconds }}
  # The autoscaler of Ray, a container beside the head, is the only one that talks to the API server.
  automountServiceAccountToken: {{ or $o.automountServiceAccountToken (and $head .root.Values.rayCluster.autoscaling.enabled) }}
  {{- range $key := list "serviceAccountName" "priorityClassName" "runtimeClassName" "schedulerName" }}
  {{- with get $o $key }}
  {{ $key }}: {{ . }}
  {{- end }}
  {{- end }}
  {{- range $key := list "imagePullSecrets" "nodeSelector" "securityContext" "initContainers" }}
  {{- with get $o $key }}
  {{ $key }}:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  {{- include "linckia.affinity" . | nindent 2 }}
  tolerations:
    {{- include "linckia.tolerations" $o | nindent 4 }}
  {{- with $o.topologySpread }}
  topologySpreadConstraints:
    {{- range . }}
    - {{- include "linckia.merge" (dict "base" (dict "maxSkew" 1 "whenUnsatisfiable" "DoNotSchedule" "labelSelector" (dict "matchLabels" $.podLabels)) "over" .) | nindent 6 }}
    {{- end }}
  {{- end }}
  containers:
    - name: ray
      image: {{ $o.image }}
      imagePullPolicy: {{ $o.imagePullPolicy }}
      {{- if $head }}
      # Any port that is named here drops KubeRay's own four from the head's Service, so all four are.
      ports:
        - {name: gcs-server, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        - {name: client, containerPort: 10001}
        - {name: metrics, containerPort: 8080}
      {{- else }}
      ports:
        - {name: metrics, containerPort: 8080}
      {{- end }}
      env:
        {{- include "linckia.rayEnv" . | nindent 8 }}
      {{- with include "linckia.rayEnvFrom" . | fromYamlArray }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      resources:
        {{- include "linckia.rayResources" $o | nindent 8 }}
      {{- with $o.containerSecurityContext }}
      securityContext:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      volumeMounts:
        - {name: shared-memory, mountPath: /dev/shm}
        {{- with $o.modelCache }}
        - {name: model-cache, mountPath: {{ .mountPath }}}
        {{- end }}
        {{- with $o.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    {{- with $o.sidecars }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    # Ray's object store and the saved states of the node tier: gone with the pod, not with a process.
    - name: shared-memory
      emptyDir: {medium: Memory, sizeLimit: {{ $memory.shm | quote }}}
    {{- with $o.modelCache }}
    - name: model-cache
      {{- toYaml .volume | nindent 6 }}
    {{- end }}
    {{- with $o.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* requests and limits: equal but for what `requests` says. Memory, GPUs and RDMA devices cannot be promised twice. */}}
{{- define "linckia.rayResources" -}}
{{- $limits := merge (dict "cpu" (toString .cpus) "memory" .memory) (.extraResources | default dict) -}}
{{- if .gpus -}}{{- $_ := set $limits (.gpuResource | default "nvidia.com/gpu") (toString .gpus) -}}{{- end -}}
limits:
  {{- toYaml $limits | nindent 2 }}
requests:
  {{- include "linckia.merge" (dict "base" $limits "over" .requests) | nindent 2 }}
{{- end -}}

{{- define "linckia.rayEnv" -}}
{{- $token := dict "name" "LINCKIA_TOKEN" "valueFrom" (dict "secretKeyRef" (dict "name" (include "linckia.tokenSecret" .root) "key" .root.Values.token.key)) -}}
{{- $env := list $token -}}
{{- $env = append $env (dict "name" "RAY_AUTH_MODE" "value" .root.Values.rayCluster.rayAuthMode) -}}
{{- $env = append $env (dict "name" "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S" "value" (toString .options.drainSeconds)) -}}
{{- with .options.modelCache -}}
{{- $env = append $env (dict "name" "HF_HOME" "value" .mountPath) -}}
{{- end -}}
{{- include "linckia.join" (dict "key" "env" "base" $env "over" (.options.env | default list)) -}}
{{- end -}}

{{- define "linckia.rayEnvFrom" -}}
{{- $sources := list -}}
{{- with .root.Values.storage.credentialsSecret -}}
{{- $sources = append $sources (dict "secretRef" (dict "name" .)) -}}
{{- end -}}
{{- toYaml (concat $sources (.options.envFrom | default list)) -}}
{{- end -}}

{{/* The pool's affinity, with its zones put into every required node selector term. */}}
{{- define "linckia.affinity" -}}
{{- $affinity := deepCopy (.options.affinity | default dict) -}}
{{- with .options.zones -}}
{{- $zones := dict "key" "topology.kubernetes.io/zone" "operator" "In" "values" . -}}
{{- $node := get $affinity "nodeAffinity" | default dict -}}
{{- $required := get $node "requiredDuringSchedulingIgnoredDuringExecution" | default dict -}}
{{- $terms := list -}}
{{- range $term := get $required "nodeSelectorTerms" | default (list dict) -}}
{{- $terms = append $terms (merge (dict "matchExpressions" (append (get $term "matchExpressions" | default list) $zones)) $term) -}}
{{- end -}}
{{- $_ := set $node "requiredDuringSchedulingIgnoredDuringExecution" (dict "nodeSelectorTerms" $terms) -}}
{{- $_ := set $affinity "nodeAffinity" $node -}}
{{- end -}}
{{- with $affinity -}}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end -}}
{{- end -}}

{{/* GPU nodes are tainted; a node that is cut off is given up after unreachableSeconds, not after Kubernetes' 300. Own ones win. */}}
{{- define "linckia.tolerations" -}}
{{- $own := .tolerations | default list -}}
{{- $taken := list -}}
{{- range $own -}}{{- $taken = append $taken (.key | default "") -}}{{- end -}}
{{- $result := list -}}
{{- range $key := list "node.kubernetes.io/unreachable" "node.kubernetes.io/not-ready" -}}
{{- if not (has $key $taken) -}}
{{- $result = append $result (dict "key" $key "operator" "Exists" "effect" "NoExecute" "tolerationSeconds" (int $.unreachableSeconds)) -}}
{{- end -}}
{{- end -}}
{{- $gpu := .gpuResource | default "nvidia.com/gpu" -}}
{{- if and .gpus (not (has $gpu $taken)) -}}
{{- $result = append $result (dict "key" $gpu "operator" "Exists" "effect" "NoSchedule") -}}
{{- end -}}
{{- toYaml (concat $result $own) -}}
{{- end -}}
