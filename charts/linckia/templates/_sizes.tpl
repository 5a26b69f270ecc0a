{{/* A Kubernetes quantity such as 1.5Gi in bytes: Ray's own flags take nothing else. */}}
{{- define "linckia.bytes" -}}
{{- $number := regexFind "^[0-9]+([.][0-9]+)?" . -}}
{{- $factors := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- mulf (float64 $number) (get $factors (trimPrefix $number .)) | int64 -}}
{{- end -}}

{{/*
How a Ray node's memory is shared out, in bytes: (memory, shm, objectStore, heap). /dev/shm holds Ray's object store and the node tier's
states under /dev/shm/linckia, and every byte in it counts against the container's limit; the heap is what is left for processes.
Takes (where, options).
*/}}
{{- define "linckia.memory" -}}
{{- $memory := include "linckia.bytes" .options.memory | int64 -}}
{{- $shm := .options.shm | empty | ternary (div $memory 2) (include "linckia.bytes" (.options.shm | default "0") | int64) -}}
{{- $objectStore := .options.objectStoreMemory | empty | ternary (div (mul $shm 2) 5) (include "linckia.bytes" (.options.objectStoreMemory | default "0") | int64) -}}
{{- if ge $shm $memory -}}
{{- fail (printf "\n\n%s.shm: %s does not fit: all of /dev/shm counts against the container's memory, %s.\nNext: lower shm, or raise memory\n" .where .options.shm .options.memory) -}}
{{- end -}}
{{- if gt $objectStore $shm -}}
{{- fail (printf "\n\n%s.objectStoreMemory: %s does not fit in /dev/shm, %d bytes; Ray would use a disk.\nNext: lower objectStoreMemory, or raise shm\n" .where .options.objectStoreMemory $shm) -}}
{{- end -}}
{{- dict "memory" (toString $memory) "shm" (toString $shm) "objectStore" (toString $objectStore) "heap" (toString (sub $memory $shm)) | toYaml -}}
{{- end -}}

{{/* CPUs as a number: 8, "8", "7500m". */}}
{{- define "linckia.cpus" -}}
{{- $text := toString . -}}
{{- if hasSuffix "m" $text -}}{{ divf (float64 (trimSuffix "m" $text)) 1000 }}{{- else -}}{{ $text }}{{- end -}}
{{- end -}}
