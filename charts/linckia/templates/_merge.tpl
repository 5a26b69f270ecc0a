{{/*
One rule for all merging: maps are merged; lists of objects are joined, an object of the same name taking the place of the first (containers
are merged); lists of words and everything else are replaced; null takes a key away.
Takes (base, over), gives YAML.
*/}}
{{- define "linckia.merge" -}}
{{- $over := .over | default dict -}}
{{- $result := dict -}}
{{- range $key, $base := .base -}}
  {{- if not (hasKey $over $key) -}}
    {{- $_ := set $result $key $base -}}
  {{- else -}}
    {{- $new := get $over $key -}}
    {{- if and (kindIs "map" $base) (kindIs "map" $new) -}}
      {{- $_ := set $result $key (include "linckia.merge" (dict "base" $base "over" $new) | fromYaml) -}}
    {{- else if and (kindIs "slice" $base) (kindIs "slice" $new) -}}
      {{- $_ := set $result $key (include "linckia.join" (dict "key" $key "base" $base "over" $new) | fromYamlArray) -}}
    {{- else if not (kindIs "invalid" $new) -}}
      {{- $_ := set $result $key $new -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- range $key, $new := $over -}}
  {{- if and (not (hasKey $.base $key)) (not (kindIs "invalid" $new)) -}}
    {{- $_ := set $result $key $new -}}
  {{- end -}}
{{- end -}}
{{- toYaml $result -}}
{{- end -}}

{{/* Takes (key, base, over) where base and over are the lists at that key, gives a YAML list. */}}
{{- define "linckia.join" -}}
{{- $by := eq .key "volumeMounts" | ternary "mountPath" "name" -}}
{{- $merged := has .key (list "containers" "initContainers" "sidecars") -}}
{{- $named := dict -}}
{{- range $item := .over -}}
  {{- if kindIs "map" $item -}}{{- if hasKey $item $by -}}{{- $_ := set $named (get $item $by) $item -}}{{- end -}}{{- end -}}
{{- end -}}
{{- $result := list -}}
{{- $placed := dict -}}
{{- range $item := .base -}}
  {{- if kindIs "map" $item -}}
    {{- $name := get $item $by -}}
    {{- if and $name (hasKey $named $name) -}}
      {{- $new := get $named $name -}}
      {{- if $merged -}}{{- $new = include "linckia.merge" (dict "base" $item "over" $new) | fromYaml -}}{{- end -}}
      {{- $result = append $result $new -}}
      {{- $_ := set $placed $name true -}}
    {{- else -}}
      {{- $result = append $result $item -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- range $item := .over -}}
  {{- if kindIs "map" $item -}}
    {{- if not (hasKey $placed (get $item $by | toString)) -}}{{- $result = append $result $item -}}{{- end -}}
  {{- else -}}
    {{- $result = append $result $item -}}
  {{- end -}}
{{- end -}}
{{- toYaml $result -}}
{{- end -}}
