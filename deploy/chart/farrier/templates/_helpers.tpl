{{/* Labels that selectors use to find the pods. They must never change. */}}
{{- define "farrier.labels" -}}
app.kubernetes.io/name: farrier
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* Labels of the guard of driver swaps. */}}
{{- define "farrier.guardLabels" -}}
app.kubernetes.io/name: farrier-swap-guard
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* Name of farrier's lease and field manager: `farrier`, or `farrier-NAME`. */}}
{{- define "farrier.manager" -}}
farrier{{ with .Values.instance }}-{{ . }}{{ end }}
{{- end }}

{{/* Location of the registry, without a slash at its end. It has no default. */}}
{{- define "farrier.registry" -}}
{{ required "registry.location: say where driver images are published, such as registry.example.com/drivers" (regexReplaceAll "/+$" .Values.registry.location "") }}
{{- end }}

{{/* Namespaces that farrier may write to, separated by commas, or `*`. */}}
{{- define "farrier.writeNamespaces" -}}
{{- $namespaces := default (list .Release.Namespace) .Values.rbac.writeNamespaces }}
{{- if and (has "*" $namespaces) (gt (len $namespaces) 1) }}
{{- fail "rbac.writeNamespaces: either names or *" }}
{{- end }}
{{- join "," $namespaces }}
{{- end }}

{{/* Whether the pod meets Pod Security `restricted`. The other engines run as root or need access to the node. */}}
{{- define "farrier.restricted" -}}
{{- if has .Values.engine (list "kubernetes" "none") }}true{{ end }}
{{- end }}

{{/* Settings of the engine: farrier's name for it, socket, size of the cache, requests and limits. */}}
{{- define "farrier.engine" -}}
{{- if eq .Values.engine "sandbox" }}
name: sandbox
# A build writes up to 32Gi into the cache.
cache: 64Gi
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
