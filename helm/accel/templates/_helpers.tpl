{{- define "accel.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "accel.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | toYaml }}
app.kubernetes.io/instance: {{ toYaml .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* metadata of an object in the release's namespace. Takes (dict "root" $ "name" … "annotations" …). */ -}}
{{- define "accel.metadata" -}}
name: {{ toYaml .name }}
{{- if not .cluster }}
namespace: {{ toYaml .root.Release.Namespace }}
{{- end }}
labels:
  {{- include "accel.labels" .root | nindent 2 }}
{{- with merge dict (default dict .annotations) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "accel.serviceAccount" -}}
{{- default (include "accel.fullname" .) .Values.serviceAccount.name -}}
{{- end -}}

{{- define "accel.jobServiceAccount" -}}
{{- default (printf "%s-job" (include "accel.fullname" .)) .Values.jobServiceAccount.name -}}
{{- end -}}

{{- define "accel.snapshots" -}}
{{- default (printf "%s-snapshots" (include "accel.fullname" .)) .Values.snapshots.name -}}
{{- end -}}

{{- define "accel.clusterQueue" -}}
{{- default (include "accel.fullname" .) .Values.kueue.clusterQueue.name -}}
{{- end -}}

{{- define "accel.jobPods" -}}
matchExpressions:
  - key: accel.dev/job-id
    operator: Exists
{{- end -}}

{{- define "accel.pullSecrets" -}}
{{- if . -}}
imagePullSecrets:
{{- range . }}
  - name: {{ toYaml . }}
{{- end }}
{{- end -}}
{{- end -}}

{{- define "accel.toolsImage" -}}
{{- with .Values.tools.image -}}
{{- if .digest -}}{{ .repository }}@{{ .digest }}{{- else -}}{{ .repository }}:{{ .tag }}{{- end -}}
{{- end -}}
{{- end -}}

{{- /* The restricted Pod Security Standard, for a pod and for its container. */ -}}
{{- define "accel.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.tools.runAsUser }}
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "accel.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- /* The objects of each kind of job that is allowed: group, version and plural. */ -}}
{{- define "accel.kinds" -}}
{{- $known := dict
  "pytorchjob" (dict "group" "kubeflow.org" "version" "v1" "resource" "pytorchjobs")
  "jobset" (dict "group" "jobset.x-k8s.io" "version" "v1alpha2" "resource" "jobsets")
  "job" (dict "group" "batch" "version" "v1" "resource" "jobs")
  "trainjob" (dict "group" "trainer.kubeflow.org" "version" "v1alpha1" "resource" "trainjobs") -}}
kinds:
{{- range $kind := list "pytorchjob" "jobset" "job" "trainjob" }}
{{- if index $.Values.kinds $kind }}
  - {{ toJson (index $known $kind) }}
{{- end }}
{{- end }}
{{- end -}}
