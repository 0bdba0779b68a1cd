{{- /* What schedulers/kubernetes builds in Python, from the same facts; a test compares the two. */ -}}

{{- define "job.name" -}}
{{- $name := .Values.name -}}
{{- if not $name -}}
{{- $name = regexReplaceAll "^[0-9-]+" (regexReplaceAll "[^a-z0-9]+" .Release.Name "-") "" -}}
{{- end -}}
{{- default "job" $name -}}
{{- end -}}

{{- /* A value as text, without nulls: Helm 4 drops those among the defaults, and Helm 3 does not. */ -}}
{{- define "job.said" -}}
{{- if kindIs "map" . -}}
{{- $found := dict -}}
{{- range $key, $value := . -}}
{{- if not (kindIs "invalid" $value) -}}{{- $_ := set $found $key (include "job.said" $value) -}}{{- end -}}
{{- end -}}
{{- toJson $found -}}
{{- else if kindIs "slice" . -}}
{{- $found := list -}}
{{- range . -}}{{- $found = append $found (include "job.said" .) -}}{{- end -}}
{{- toJson $found -}}
{{- else -}}
{{- toJson . -}}
{{- end -}}
{{- end -}}

{{- /* An id as accel's own are, 11 of its letters: a hash, since every render must give the same, after a 0, which no id
that holds a time begins with. Not of the revision: `helm template` has always the first one, and an upgrade that changes
nothing would end the job. */ -}}
{{- define "job.id" -}}
{{- if .Values.jobId -}}
{{- .Values.jobId -}}
{{- else -}}
{{- $said := include "job.said" (omit .Values "global") -}}
{{- printf "%s %s %s %s" .Release.Namespace .Release.Name .Chart.Version $said | sha256sum | trunc 10 | printf "0%s" -}}
{{- end -}}
{{- end -}}

{{- /* What `accel submit` notes on the job's object, by which accel on any machine follows the job: schedulers/job.py. */ -}}
{{- define "job.spec" -}}
{{- $wanted := .Values.resources -}}
{{- $resources := dict "gpus" (int64 $wanted.gpus) -}}
{{- with $wanted.memoryGb -}}{{- $_ := set $resources "memory_gb" (float64 .) -}}{{- end -}}
{{- with $wanted.shmGb -}}{{- $_ := set $resources "shm_gb" (float64 .) -}}{{- end -}}
{{- with $wanted.cpus -}}{{- $_ := set $resources "cpus" (int64 .) -}}{{- end -}}
{{- with $wanted.accelerator -}}{{- $_ := set $resources "accelerator" . -}}{{- end -}}
{{- $spec := dict "argv" .Values.argv "entry" .Values.entry "name" (include "job.name" .) "nodes" (int64 .Values.nodes) -}}
{{- with .Values.maxNodes -}}{{- $_ := set $spec "max_nodes" (int64 .) -}}{{- end -}}
{{- with .Values.procsPerNode -}}{{- $_ := set $spec "procs_per_node" (int64 .) -}}{{- end -}}
{{- $_ := set $spec "resources" $resources -}}
{{- $_ := set $spec "env" .Values.env -}}
{{- $_ := set $spec "secrets" .Values.secrets -}}
{{- $_ := set $spec "workdir" .Values.workdir -}}
{{- $_ := set $spec "image" .Values.image -}}
{{- $_ := set $spec "setup" .Values.setup -}}
{{- $_ := set $spec "time_limit_s" .Values.timeLimit -}}
{{- $_ := set $spec "grace_s" .Values.grace -}}
{{- $_ := set $spec "retry" (dict "max_restarts" (int64 .Values.maxRestarts)) -}}
{{- toJson $spec -}}
{{- end -}}

{{- define "job.objectName" -}}
{{- $id := include "job.id" . -}}
{{- printf "%s-%s" (include "job.name" . | trunc (int (sub 39 (len $id))) | trimSuffix "-") $id -}}
{{- end -}}

{{- /* Of everything that belongs to the job; (dict "root" $ "manager" …). Helm marks as its own what it installs. */ -}}
{{- define "job.ownLabels" -}}
app.kubernetes.io/managed-by: {{ .manager }}
accel.dev/job-id: {{ include "job.id" .root | quote }}
accel.dev/name: {{ include "job.name" .root | quote }}
{{- end -}}

{{- define "job.metadata" -}}
name: {{ include "job.objectName" . }}
namespace: {{ toYaml .Release.Namespace }}
{{- end -}}

{{- define "job.workloadMetadata" -}}
{{ include "job.metadata" . }}
labels:
  {{- include "job.ownLabels" (dict "root" . "manager" .Release.Service) | nindent 2 }}
  {{- with .Values.queue }}
  kueue.x-k8s.io/queue-name: {{ . | quote }}
  {{- end }}
  {{- with .Values.queuePriority }}
  kueue.x-k8s.io/priority-class: {{ . | quote }}
  {{- end }}
  {{- with .Values.labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
annotations:
  {{- with .Values.annotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  accel.dev/spec: {{ include "job.spec" . | quote }}
{{- end -}}

{{- define "job.container" -}}
{{- ternary "node" "pytorch" (eq .Values.workload "trainjob") -}}
{{- end -}}

{{- define "job.processes" -}}
{{- .Values.procsPerNode | default .Values.resources.gpus | default 1 | int64 -}}
{{- end -}}

{{- define "job.suspended" -}}
{{- if or .Values.suspend .Values.queue }}true{{ end -}}
{{- end -}}

{{- /* A word as a shell reads it back. */ -}}
{{- define "job.shellWord" -}}
{{- if regexMatch "^[A-Za-z0-9_@%+=:,./-]+$" . -}}
{{- . -}}
{{- else -}}
{{- printf "'%s'" (replace "'" "'\"'\"'" .) -}}
{{- end -}}
{{- end -}}

{{- /* Gibibytes as a quantity. */ -}}
{{- define "job.memory" -}}
{{- $size := float64 . -}}
{{- if eq (floor $size) $size -}}
{{- printf "%dGi" (int64 $size) -}}
{{- else -}}
{{- printf "%dMi" (int64 (ceil (mulf $size 1024.0))) -}}
{{- end -}}
{{- end -}}

{{- define "job.gpuResource" -}}
{{- $known := dict "nvidia" "nvidia.com/gpu" "amd" "amd.com/gpu" "intel" "gpu.intel.com/i915" "gaudi" "habana.ai/gaudi" "neuron" "aws.amazon.com/neuron" "tpu" "google.com/tpu" -}}
{{- default (index $known .Values.gpu) .Values.gpuResource -}}
{{- end -}}

{{- define "job.gpuLabel" -}}
{{- $known := dict "nvidia" "nvidia.com/gpu.product" "amd" "amd.com/gpu.product-name" "intel" "gpu.intel.com/product" "gaudi" "node.kubernetes.io/instance-type" "neuron" "node.kubernetes.io/instance-type" "tpu" "cloud.google.com/gke-tpu-accelerator" -}}
{{- default (index $known .Values.gpu) .Values.gpuLabel -}}
{{- end -}}

{{- /* The words that a pod runs, as a JSON list; (dict "root" $ "launch" words). */ -}}
{{- define "job.command" -}}
{{- $values := .root.Values -}}
{{- $processes := include "job.processes" .root | int64 -}}
{{- $words := concat (list "launch" "--num_processes" (mul $processes (int64 $values.nodes) | toString)) .launch -}}
{{- if or (gt (int64 $values.nodes) 1) .launch -}}
{{- $words = concat $words (list "--rdzv_conf" (printf "timeout=%d" (int64 $values.startTimeout))) -}}
{{- end -}}
{{- if $values.cpu -}}{{- $words = append $words "--cpu" -}}{{- end -}}
{{- $words = concat $words (list "--shutdown_timeout" (int64 $values.grace | toString)) -}}
{{- if gt $processes 1 -}}
{{- $words = concat $words (list "--log_dir" "/tmp/accel-logs" "--tee" "3") -}}
{{- end -}}
{{- if eq $values.entry "module" -}}{{- $words = append $words "-m" -}}{{- end -}}
{{- if eq $values.entry "command" -}}{{- $words = append $words "--no_python" -}}{{- end -}}
{{- include "job.run" (dict "root" .root "words" (concat (append $words "--") $values.argv)) -}}
{{- end -}}

{{- /* accel with these words, after the commands of `setup`, as a JSON list; (dict "root" $ "words" words). */ -}}
{{- define "job.run" -}}
{{- $values := .root.Values -}}
{{- $accel := list "accel" -}}
{{- if $values.python -}}
{{- $accel = list $values.python "-c" "import sys; sys.path[:] = [p for p in sys.path if p]; from accel.cli import main; sys.exit(main())" -}}
{{- end -}}
{{- $words := concat $accel .words -}}
{{- if $values.setup -}}
{{- $lines := list "set -e" -}}
{{- range $values.setup -}}
{{- $line := list -}}
{{- range . -}}{{- $line = append $line (include "job.shellWord" .) -}}{{- end -}}
{{- $lines = append $lines (join " " $line) -}}
{{- end -}}
{{- $lines = append $lines "exec \"$@\"" -}}
{{- $words = concat (list "sh" "-c" (join "\n" $lines) "sh") $words -}}
{{- end -}}
{{- $plain := list -}}
{{- range $words -}}{{- $plain = append $plain (replace "$" "$$" .) -}}{{- end -}}
{{- toJson $plain -}}
{{- end -}}

{{- /* requests and limits; (dict "root" $ "devices" bool). */ -}}
{{- define "job.resources" -}}
{{- $wanted := .root.Values.resources -}}
{{- $found := dict -}}
{{- if $wanted.cpus -}}{{- $_ := set $found "cpu" (int64 $wanted.cpus | toString) -}}{{- end -}}
{{- if $wanted.memoryGb -}}{{- $_ := set $found "memory" (include "job.memory" $wanted.memoryGb) -}}{{- end -}}
{{- if .devices -}}
{{- if $wanted.gpus -}}{{- $_ := set $found (include "job.gpuResource" .root) (int64 $wanted.gpus | toString) -}}{{- end -}}
{{- range $name, $amount := $wanted.other -}}{{- $_ := set $found $name (toString $amount) -}}{{- end -}}
{{- end -}}
{{- if $found }}
resources:
  requests: {{ toJson $found }}
  limits: {{ toJson $found }}
{{- end }}
{{- end -}}

{{- define "job.security" -}}
{{- $found := dict -}}
{{- with .Values -}}
{{- if not (kindIs "invalid" .runAsUser) -}}{{- $_ := set $found "runAsUser" (int64 .runAsUser) -}}{{- end -}}
{{- if not (kindIs "invalid" .runAsGroup) -}}{{- $_ := set $found "runAsGroup" (int64 .runAsGroup) -}}{{- end -}}
{{- if .readOnlyRootFilesystem -}}{{- $_ := set $found "readOnlyRootFilesystem" true -}}{{- end -}}
{{- if eq .podSecurity "restricted" -}}
{{- $_ := set $found "runAsNonRoot" true -}}
{{- $_ := set $found "allowPrivilegeEscalation" false -}}
{{- $_ := set $found "capabilities" (dict "drop" (list "ALL")) -}}
{{- $_ := set $found "seccompProfile" (dict "type" "RuntimeDefault") -}}
{{- else if .ipcLock -}}
{{- $_ := set $found "capabilities" (dict "add" (list "IPC_LOCK")) -}}
{{- end -}}
{{- end -}}
{{- if $found }}
securityContext: {{ toJson $found }}
{{- end }}
{{- end -}}

{{- /* What every container of a pod has; (dict "root" $ "devices" bool "image" …). */ -}}
{{- define "job.base" -}}
image: {{ .image | quote }}
{{- with .root.Values.imagePullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
{{- include "job.resources" . }}
{{- include "job.security" .root }}
{{- end -}}

{{- define "job.workingDir" -}}
{{- $top := ternary .Values.code.dir "/accel/code" (eq .Values.code.kind "image") -}}
{{- if $top -}}
{{- if eq .Values.workdir "." -}}{{- $top -}}{{- else -}}{{- printf "%s/%s" (trimSuffix "/" $top) .Values.workdir -}}{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Whether Helm, or another that knows its hooks, applies this to a cluster: `helm template` without `--api-versions`
names only what Kubernetes' client library has, where this group is not. */ -}}
{{- define "job.hooks" -}}
{{- if .Capabilities.APIVersions.Has "apiregistration.k8s.io/v1" }}true{{ end -}}
{{- end -}}
