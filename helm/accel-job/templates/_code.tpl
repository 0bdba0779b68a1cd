{{- /* How many bytes of base64 one ConfigMap takes: 768 KiB of code. */ -}}
{{- define "job.codePart" -}}1048576{{- end -}}

{{- define "job.codeParts" -}}
{{- $part := include "job.codePart" . | int -}}
{{- max 1 (div (add (len .Values.code.archive) $part -1) $part) -}}
{{- end -}}

{{- define "job.codeDigest" -}}
{{- if eq .Values.code.kind "configmap" -}}
{{- b64dec .Values.code.archive | sha256sum -}}
{{- else -}}
{{- .Values.code.digest -}}
{{- end -}}
{{- end -}}

{{- define "job.codeVolumes" -}}
{{- if eq .Values.code.kind "configmap" -}}
- name: accel-code
  projected:
    sources:
      {{- range until (include "job.codeParts" . | int) }}
      - configMap: {name: {{ include "job.objectName" $ }}-code-{{ . }}}
      {{- end }}
{{- else if eq .Values.code.kind "pvc" -}}
- name: accel-code
  persistentVolumeClaim: {claimName: {{ .Values.code.claim | quote }}, readOnly: true}
{{- end -}}
{{- end -}}

{{- define "job.codeContainers" -}}
{{- $digest := include "job.codeDigest" . -}}
{{- $file := printf "%s.tar.gz" $digest -}}
{{- $parts := list -}}
{{- if eq .Values.code.kind "store" -}}
{{- $parts = list (printf "/accel/packed/%s" $file) -}}
{{- else if eq .Values.code.kind "pvc" -}}
{{- $parts = list (printf "/accel-code/%s" $file) -}}
{{- else -}}
{{- range until (include "job.codeParts" . | int) -}}{{- $parts = append $parts (printf "/accel-code/code-%d" .) -}}{{- end -}}
{{- end -}}
{{- if eq .Values.code.kind "store" -}}
{{- with .Values.code.store -}}
{{- $command := list "aws" "s3" "cp" "--only-show-errors" (printf "%s/%s" (trimSuffix "/" .url) $file) (index $parts 0) -}}
{{- with .endpoint -}}{{- $command = concat $command (list "--endpoint-url" .) -}}{{- end -}}
- name: accel-fetch
  {{- include "job.base" (dict "root" $ "devices" false "image" .image) | nindent 2 }}
  command: {{ toJson $command }}
  env:
    - {name: HOME, value: /accel}
    {{- with .region }}
    - {name: AWS_REGION, value: {{ . | quote }}}
    {{- end }}
  {{- with .secret }}
  envFrom:
    - secretRef: {name: {{ . | quote }}}
  {{- end }}
  terminationMessagePolicy: FallbackToLogsOnError
  volumeMounts:
    - {name: accel, mountPath: /accel}
    {{- with include "job.tmpMount" $ }}
    {{- . | nindent 4 }}
    {{- end }}
{{ end -}}
{{- end -}}
- name: accel-code
  {{- include "job.base" (dict "root" $ "devices" false "image" .Values.image) | nindent 2 }}
  command: {{ concat (list (default "python3" .Values.python) "-c" (.Files.Get "files/unpack") $digest "/accel/code") $parts | toJson }}
  terminationMessagePolicy: FallbackToLogsOnError
  volumeMounts:
    - {name: accel, mountPath: /accel}
    {{- if ne .Values.code.kind "store" }}
    - {name: accel-code, mountPath: /accel-code, readOnly: true}
    {{- end }}
    {{- with include "job.tmpMount" $ }}
    {{- . | nindent 4 }}
    {{- end }}
{{- end -}}
