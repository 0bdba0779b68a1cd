{{- /* The pods' template; (dict "root" $ "env" [objects] "launch" [words] "labels" {…} "annotations" {…} "restartPolicy" … "subdomain" …). */ -}}
{{- define "job.template" -}}
{{- $ := .root -}}
{{- $values := .root.Values -}}
metadata:
  labels:
    {{- include "job.ownLabels" (dict "root" $ "manager" "accel") | nindent 4 }}
    {{- with .labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- with $values.labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- $stays := or (gt (mul (include "job.processes" $ | int64) (int64 $values.nodes)) 1) .launch $values.timeLimit }}
  annotations:
    {{- merge (deepCopy $values.annotations) (default dict .annotations) (dict "accel.dev/report" (ternary "none" "launcher" (empty $stays))) | toYaml | nindent 4 }}
spec:
  {{- with .restartPolicy }}
  restartPolicy: {{ . }}
  {{- end }}
  {{- with .subdomain }}
  subdomain: {{ . }}
  {{- end }}
  terminationGracePeriodSeconds: {{ add (int64 $values.grace) 10 }}
  # A process that is the first of its PID namespace ignores SIGTERM unless it asks for it.
  shareProcessNamespace: true
  enableServiceLinks: false
  {{- if $values.serviceAccount }}
  serviceAccountName: {{ $values.serviceAccount | quote }}
  {{- else }}
  automountServiceAccountToken: false
  {{- end }}
  {{- with $values.imagePullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . | quote }}
    {{- end }}
  {{- end }}
  {{- with $values.priorityClass }}
  priorityClassName: {{ . | quote }}
  {{- end }}
  {{- if $values.volcanoQueue }}
  schedulerName: volcano
  {{- end }}
  {{- if $values.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  {{- with include "job.nodeSelector" $ | fromJson }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with include "job.tolerations" $ | fromJsonArray }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if not (kindIs "invalid" $values.fsGroup) }}
  securityContext:
    fsGroup: {{ int64 $values.fsGroup }}
  {{- end }}
  {{- if ne $values.code.kind "image" }}
  initContainers:
    {{- include "job.codeContainers" $ | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ include "job.container" $ }}
      {{- include "job.base" (dict "root" $ "devices" true "image" $values.image) | nindent 6 }}
      command: {{ include "job.command" (dict "root" $ "launch" .launch) }}
      {{- with include "job.workingDir" $ }}
      workingDir: {{ . | quote }}
      {{- end }}
      env:
        - {name: ACCEL_JOB_ID, value: {{ include "job.id" $ | quote }}}
        {{- if and (include "job.ownHome" $) (not (hasKey $values.env "HOME")) }}
        - {name: HOME, value: /accel/home}
        {{- end }}
        {{- if not (kindIs "invalid" $values.runAsUser) }}
        {{- range $name := list "USER" "LOGNAME" }}
        {{- if not (hasKey $values.env $name) }}
        - {name: {{ $name }}, value: accel}
        {{- end }}
        {{- end }}
        {{- end }}
        {{- range $name, $value := $values.env }}
        - {name: {{ $name }}, value: {{ replace "$" "$$" $value | toJson }}}
        {{- end }}
        {{- with $values.secrets }}
        - {name: ACCEL_SECRETS, value: {{ keys . | sortAlpha | join "," | quote }}}
        {{- end }}
        {{- range $name, $reference := $values.secrets }}
        {{- $parts := splitn "/" 2 (trimPrefix "secret:" $reference) }}
        - {name: {{ $name }}, valueFrom: {secretKeyRef: {name: {{ $parts._0 | quote }}, key: {{ $parts._1 | quote }}}}}
        {{- end }}
        - {name: ACCEL_POD_UID, valueFrom: {fieldRef: {fieldPath: metadata.uid}}}
        - {name: ACCEL_STARTS, value: /accel/starts}
        {{- if include "job.meets" $ }}
        - {name: ACCEL_SERVICE, value: {{ include "job.objectName" $ }}-rendezvous}
        {{- end }}
        {{- if include "job.fixedWorld" $ }}
        - {name: ACCEL_POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
        {{- if not (and (has $values.workload (list "job" "pytorchjob")) (gt (int64 $values.maxRestarts) 0)) }}
        - {name: ACCEL_NODE_0_REPORTS, value: "1"}
        {{- end }}
        {{- end }}
        {{- with $values.timeLimit }}
        - {name: ACCEL_TIME_LIMIT, value: {{ int64 . | quote }}}
        - {name: ACCEL_TIME_LIMIT_EXIT, value: {{ ternary "0,0" "86,0" (and (eq $values.workload "pytorchjob") (gt (int64 $values.maxRestarts) 0)) | quote }}}
        {{- end }}
        {{- with .env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- if ne $values.workload "trainjob" }}
      ports:
        - name: {{ ternary "pytorchjob-port" "rendezvous" (eq $values.workload "pytorchjob") }}
          containerPort: 29500
      {{- end }}
      terminationMessagePolicy: FallbackToLogsOnError
      volumeMounts:
        - {name: accel, mountPath: /accel}
        {{- if include "job.ownHome" $ }}
        - {name: accel-home, mountPath: /accel/home}
        {{- end }}
        {{- with include "job.tmpMount" $ }}
        {{- . | nindent 8 }}
        {{- end }}
        - {name: accel-shm, mountPath: /dev/shm}
        {{- range $index, $volume := $values.volumes }}
        - name: volume-{{ $index }}
          mountPath: {{ $volume.mount | quote }}
          {{- with $volume.subPath }}
          subPath: {{ . | quote }}
          {{- end }}
          {{- if $volume.readOnly }}
          readOnly: true
          {{- end }}
        {{- end }}
  volumes:
    - name: accel
      emptyDir: {}
    {{- if include "job.ownHome" $ }}
    - name: accel-home
      emptyDir: {}
    {{- end }}
    {{- if include "job.tmpMount" $ }}
    - name: accel-tmp
      emptyDir: {}
    {{- end }}
    - name: accel-shm
      emptyDir:
        medium: Memory
        {{- with $values.resources.shmGb }}
        sizeLimit: {{ include "job.memory" . }}
        {{- end }}
    {{- include "job.codeVolumes" $ | nindent 4 }}
    {{- range $index, $volume := $values.volumes }}
    - name: volume-{{ $index }}
      {{- include "job.volumeSource" $volume | nindent 6 }}
    {{- end }}
{{- end -}}

{{- define "job.volumeSource" -}}
{{- if .claim -}}
persistentVolumeClaim: {claimName: {{ .claim | quote }}}
{{- else if .configMap -}}
configMap: {name: {{ .configMap | quote }}}
{{- else if .secret -}}
secret: {secretName: {{ .secret | quote }}}
{{- else if .hostPath -}}
hostPath: {path: {{ .hostPath | quote }}}
{{- else if .nfs -}}
{{- $parts := splitn ":" 2 .nfs -}}
nfs: {server: {{ $parts._0 | quote }}, path: {{ $parts._1 | quote }}}
{{- else -}}
{{- toYaml .source -}}
{{- end -}}
{{- end -}}

{{- define "job.nodeSelector" -}}
{{- $found := deepCopy .Values.nodeSelector -}}
{{- with .Values.resources.accelerator -}}
{{- if $.Values.accelerators -}}
{{- range $name, $value := index $.Values.accelerators . -}}{{- $_ := set $found $name $value -}}{{- end -}}
{{- else -}}
{{- $_ := set $found (include "job.gpuLabel" $) . -}}
{{- end -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}

{{- define "job.tolerations" -}}
{{- $found := list -}}
{{- $resource := include "job.gpuResource" . -}}
{{- $tolerated := false -}}
{{- range .Values.tolerations -}}
{{- $one := dict "operator" (.operator | default (ternary "Equal" "Exists" (hasKey . "value"))) -}}
{{- with .key -}}{{- $_ := set $one "key" . -}}{{- end -}}
{{- if hasKey . "value" -}}{{- $_ := set $one "value" .value -}}{{- end -}}
{{- with .effect -}}{{- $_ := set $one "effect" . -}}{{- end -}}
{{- if hasKey . "seconds" -}}{{- $_ := set $one "tolerationSeconds" (int64 .seconds) -}}{{- end -}}
{{- if eq (default "" .key) $resource -}}{{- $tolerated = true -}}{{- end -}}
{{- $found = append $found $one -}}
{{- end -}}
{{- if and .Values.resources.gpus (not $tolerated) -}}
{{- $found = append $found (dict "key" $resource "operator" "Exists" "effect" "NoSchedule") -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}

{{- /* Whether the image's home cannot be written to, or is none of this user. */ -}}
{{- define "job.ownHome" -}}
{{- if or .Values.readOnlyRootFilesystem (not (kindIs "invalid" .Values.runAsUser)) }}true{{ end -}}
{{- end -}}

{{- /* /tmp as a volume of the pod where the image's cannot be written to, unless the values name another. */ -}}
{{- define "job.tmpMount" -}}
{{- $own := .Values.readOnlyRootFilesystem -}}
{{- range .Values.volumes -}}{{- if eq (clean .mount) "/tmp" -}}{{- $own = false -}}{{- end -}}{{- end -}}
{{- if $own -}}- {name: accel-tmp, mountPath: /tmp}{{- end -}}
{{- end -}}

{{- /* There may be several nodes. */ -}}
{{- define "job.meets" -}}
{{- if gt (.Values.maxNodes | default .Values.nodes | int64) 1 }}true{{ end -}}
{{- end -}}

{{- /* Several nodes, whose number stays. */ -}}
{{- define "job.fixedWorld" -}}
{{- if and (gt (int64 .Values.nodes) 1) (kindIs "invalid" .Values.maxNodes) }}true{{ end -}}
{{- end -}}

{{- /* The cluster's time limit, some minutes after the launchers' own. */ -}}
{{- define "job.backstop" -}}
{{- with .Values.timeLimit }}{{ add (int64 .) (int64 $.Values.grace) 300 }}{{ end -}}
{{- end -}}
