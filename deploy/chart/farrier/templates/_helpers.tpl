{{/* The labels by which selectors find the pods: they never change. */}}
{{- define "farrier.labels" -}}
app.kubernetes.io/name: farrier
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* farrier's name in its lease and as a field manager: `farrier`, or `farrier-NAME`. */}}
{{- define "farrier.manager" -}}
farrier{{ with .Values.instance }}-{{ . }}{{ end }}
{{- end }}

{{/* The registry's location, which has no default. */}}
{{- define "farrier.registry" -}}
{{ required "registry.location: say where driver images are published, such as registry.example.com/drivers" .Values.registry.location }}
{{- end }}

{{/* Where farrier may write, with commas between the names, or `*`. It has no default. */}}
{{- define "farrier.writeNamespaces" -}}
{{- if not .Values.rbac.writeNamespaces }}
{{- fail "rbac.writeNamespaces: name the namespaces in which DaemonSets may be written and pods evicted, such as {drivers}, or {*} for all" }}
{{- end }}
{{- if and (has "*" .Values.rbac.writeNamespaces) (gt (len .Values.rbac.writeNamespaces) 1) }}
{{- fail "rbac.writeNamespaces: either names or *" }}
{{- end }}
{{- join "," .Values.rbac.writeNamespaces }}
{{- end }}

{{/* Does the pod keep to Pod Security `restricted`? The other engines are root, or need something of the node's. */}}
{{- define "farrier.restricted" -}}
{{- if has .Values.engine (list "kubernetes" "none") }}true{{ end }}
{{- end }}

{{/* Settings of the engine: its name for farrier, socket, requests and limits. */}}
{{- define "farrier.engine" -}}
{{- if eq .Values.engine "sandbox" }}
name: sandbox
resources: {requests: {cpu: 250m, memory: 1Gi}, limits: {memory: 8Gi}}
capabilities: [CHOWN, DAC_OVERRIDE, FOWNER, FSETID, SETFCAP, SETGID, SETUID, SYS_CHROOT]
{{- else if eq .Values.engine "none" }}
name: auto
resources: {requests: {cpu: 50m, memory: 128Mi}, limits: {memory: 512Mi}}
{{- else if eq .Values.engine "kubernetes" }}
name: kubernetes
resources: {requests: {cpu: 250m, memory: 256Mi}, limits: {memory: 4Gi}}
{{- else }}
name: {{ .Values.engine }}
socket: {{ eq .Values.engine "docker" | ternary "/var/run/docker.sock" "/run/podman/podman.sock" }}
resources: {requests: {cpu: 250m, memory: 256Mi}, limits: {memory: 2Gi}}
capabilities: [CHOWN, DAC_OVERRIDE, FOWNER, FSETID, SETFCAP, SETGID, SETUID, SYS_CHROOT]
{{- end }}
{{- end }}
