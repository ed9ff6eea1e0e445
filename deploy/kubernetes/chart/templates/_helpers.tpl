{{- define "longshore.labels" -}}
app.kubernetes.io/name: longshore
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* The metadata that all pods share. */}}
{{- define "longshore.pod" -}}
enableServiceLinks: false # a Service called longshore would set LONGSHORE_PORT
automountServiceAccountToken: false
terminationGracePeriodSeconds: {{ add .Values.drainTimeoutS 45 }} # the drain, and time for preStop and the end of the processes
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  seccompProfile: {type: RuntimeDefault}
  {{- with .Values.podSecurityContext }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .Values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "longshore.container" -}}
image: {{ printf "%s:%s" .Values.image.repository .Values.image.tag | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- with .Values.resources }}
resources: {{ toYaml . | nindent 2 }}
{{- end }}
lifecycle:
  preStop: # new connections go elsewhere before this pod accepts none
    exec: {command: [sh, -c, sleep 5; exec longshore admin drain]}
{{- end }}

{{- define "longshore.probes" -}}
startupProbe: # the model is loaded
  httpGet: {path: /ready, port: {{ . }}}
  periodSeconds: 10
  failureThreshold: 60
  timeoutSeconds: 5
readinessProbe:
  httpGet: {path: /ready, port: {{ . }}}
  periodSeconds: 5
  timeoutSeconds: 5
livenessProbe:
  httpGet: {path: /health, port: {{ . }}}
  periodSeconds: 10
  failureThreshold: 6
  timeoutSeconds: 5
{{- end }}
