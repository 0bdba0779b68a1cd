{{- define "job.indexedEnvironment" -}}
- {name: ACCEL_NODES, value: {{ int64 .root.Values.nodes | quote }}}
- {name: ACCEL_MASTER, value: {{ .master }}}
- {name: ACCEL_PORT, value: "29500"}
{{- end -}}

{{- define "job.failuresEnvironment" -}}
- name: ACCEL_POD_FAILURES
  valueFrom:
    fieldRef:
      fieldPath: metadata.annotations['batch.kubernetes.io/job-index-failure-count']
{{- end -}}

{{- define "job.attemptEnvironment" -}}
- name: JOBSET_RESTART_ATTEMPT
  valueFrom:
    fieldRef:
      fieldPath: metadata.annotations['jobset.sigs.k8s.io/restart-attempt']
{{- end -}}

{{- /* A JobSpec; (dict "root" $ "env" [objects] "restarts" n "subdomain" …, and "counted" unless Trainer counts). */ -}}
{{- define "job.indexedSpec" -}}
{{- $ := .root -}}
{{- if .counted }}
completions: {{ int64 $.Values.nodes }}
parallelism: {{ int64 $.Values.nodes }}
completionMode: Indexed
{{- with include "job.backstop" $ }}
activeDeadlineSeconds: {{ . }}
{{- end }}
{{- end }}
backoffLimit: {{ .restarts }}
# 86: the time limit has passed. 126 and 127: the program cannot be run, and no attempt will find it.
podFailurePolicy:
  rules:
    - action: FailJob
      onExitCodes: {containerName: {{ include "job.container" $ }}, operator: In, values: [86, 126, 127]}
      onPodConditions: []
{{- if and .subdomain (eq (int .restarts) 0) }}
    # A pod that is evicted or preempted is gone at once; this leaves the reason in the Job's condition.
    - action: FailJob
      onPodConditions: [{type: DisruptionTarget, status: "True"}]
{{- end }}
template:
  {{- include "job.template" (dict "root" $ "env" .env "launch" list "annotations" .annotations "restartPolicy" "Never" "subdomain" .subdomain) | nindent 2 }}
{{- end -}}

{{- /* What a JobSet and a TrainingRuntime both say; (dict "root" $ "env" … "counted" …). */ -}}
{{- define "job.setSpec" -}}
{{- $ := .root -}}
failurePolicy:
  maxRestarts: {{ int64 $.Values.maxRestarts }}
  {{- if $.Values.maxRestarts }}
  restartStrategy: BlockingRecreate
  {{- end }}
  # Another attempt is of no use when the time is over, or the program cannot be run.
  rules:
    - {name: final, action: FailJobSet, onJobFailureReasons: [DeadlineExceeded, PodFailurePolicy]}
replicatedJobs:
  - name: node
    replicas: 1
    template:
      {{- with .labels }}
      metadata:
        labels:
          {{- toYaml . | nindent 10 }}
      {{- end }}
      spec:
        {{- include "job.indexedSpec" (merge (dict "restarts" 0) .) | trim | nindent 8 }}
{{- end -}}

{{- /* The annotation by which Volcano finds a pod's group, for kinds that have a group of their own. */ -}}
{{- define "job.groupAnnotations" -}}
{{- if and .Values.volcanoQueue (has .Values.workload (list "job" "jobset")) -}}
{{- dict "scheduling.k8s.io/group-name" (include "job.objectName" .) | toJson -}}
{{- else -}}
{}
{{- end -}}
{{- end -}}
