{{- /* The rules of the Role. A comment says what each verb is for; `helm test` asks the cluster for every one of them. */ -}}
{{- define "accel.rules" -}}
{{- $claim := or .Values.snapshots.create .Values.snapshots.name -}}
{{- $exec := ternary "accel shell, and code that is put into the claim" "code that is put into the claim" .Values.rbac.shell -}}
{{- if not $claim -}}{{- $exec = "accel shell" -}}{{- end -}}
{{- range (include "accel.kinds" . | fromYaml).kinds }}
- apiGroups: [{{ .group }}]
  resources: [{{ .resource }}]
  verbs:
    - create # submit
    - get # the state of one job; a repeated submit compares what is there with what it would make
    - list # the states of all jobs, and a job that another machine submitted, in one request
    - watch # following: one watch for all jobs
    - patch # why the job failed, noted on it for when its pods are gone; without it only that is lost
    - delete # cancel
{{- end }}
- apiGroups: [""]
  resources: [pods]
  verbs:
    - get # why a rank ended: its exit code, out of memory, evicted
    - list # which pods are a job's
    - watch # restarts, and images that cannot be pulled, as they happen
    {{- if $claim }}
    - create # the pod that puts code into the claim
    - delete # the same pod, when it has done so
    {{- end }}
- apiGroups: [""]
  resources: [pods/log]
  verbs:
    - get # logs
{{- if or .Values.rbac.shell $claim }}
- apiGroups: [""]
  resources: [pods/exec]
  verbs:
    - get # {{ $exec }}: opens a WebSocket
    - create # the same; Kubernetes 1.35 and later ask for this too
{{- end }}
- apiGroups: [""]
  resources: [namespaces]
  verbs:
    - get # the uid of its own, which tells this cluster from another of the same name
- apiGroups: [""]
  resources: [events]
  verbs:
    - list # why a pod does not start: no node fits, quota, admission
{{- if .Values.rbac.configMaps }}
- apiGroups: [""]
  resources: [configmaps]
  verbs:
    - create # code up to 1 MiB
    - get # a repeated submit compares what is there
    - list # what is left of a submit that was cut short
    - patch # the job becomes its owner, so that it goes with the job
    - delete # what is left of a submit that was refused
{{- end }}
- apiGroups: [""]
  resources: [services]
  verbs:
    - create # the name under which the nodes of a job find each other
    - get # a repeated submit compares what is there
    - list # what is left of a submit that was cut short
    - patch # the job becomes its owner, so that it goes with the job
    - delete # what is left of a submit that was refused
{{- if .Values.kinds.trainjob }}
- apiGroups: [trainer.kubeflow.org]
  resources: [trainingruntimes]
  verbs:
    - create # what a TrainJob is made of: retries, shared memory, where the pods may run
    - get # a repeated submit compares what is there
    - patch # the job becomes its owner, so that it goes with the job
    - delete # what is left of a submit that was refused
{{- end }}
{{- if or .Values.volcano.podGroups .Values.volcano.queue.create }}
- apiGroups: [scheduling.volcano.sh]
  resources: [podgroups]
  verbs:
    - create # Volcano places all pods of a Job or a JobSet, or none
    - get # a repeated submit compares what is there
    - patch # the job becomes its owner, so that it goes with the job
    - delete # what is left of a submit that was refused
{{- end }}
{{- if $claim }}
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  resourceNames: [{{ include "accel.snapshots" . | quote }}]
  verbs:
    - get # whether the claim is there, before a job that needs it is submitted
{{- end }}
{{- end -}}
