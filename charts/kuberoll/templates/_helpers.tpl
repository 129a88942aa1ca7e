{{- define "kuberoll.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "kuberoll.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains (include "kuberoll.name" .) .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "kuberoll.name" .) | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "kuberoll.operator" -}}
{{ include "kuberoll.fullname" . }}-operator
{{- end -}}

{{- define "kuberoll.selector" -}}
app.kubernetes.io/name: {{ include "kuberoll.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "kuberoll.labels" -}}
{{ include "kuberoll.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: kuberoll
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "kuberoll.broker" -}}
{{ include "kuberoll.fullname" . }}-broker
{{- end -}}

{{- define "kuberoll.brokerSelector" -}}
app.kubernetes.io/name: {{ include "kuberoll.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: broker
{{- end -}}

{{- define "kuberoll.brokerLabels" -}}
{{- mergeOverwrite (include "kuberoll.labels" . | fromYaml) (include "kuberoll.brokerSelector" . | fromYaml) | toYaml -}}
{{- end -}}

{{- define "kuberoll.brokerServiceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- include "kuberoll.broker" . -}}
{{- else -}}
{{- .Values.sandboxes.serviceAccountName | default (include "kuberoll.broker" .) -}}
{{- end -}}
{{- end -}}

{{/* Tolerations of a pod that leaves a lost node after so many seconds, unless what is given says otherwise. */}}
{{- define "kuberoll.tolerations" -}}
{{- $given := index . 0 -}}
{{- $seconds := index . 1 -}}
{{- $tolerations := $given -}}
{{- range $key := list "node.kubernetes.io/not-ready" "node.kubernetes.io/unreachable" -}}
{{- $said := false -}}
{{- range $given }}{{- if eq (.key | default $key) $key }}{{- $said = true }}{{- end }}{{- end -}}
{{- if not $said -}}
{{- $tolerations = append $tolerations (dict "key" $key "operator" "Exists" "effect" "NoExecute" "tolerationSeconds" (int $seconds)) -}}
{{- end -}}
{{- end -}}
{{- toYaml $tolerations -}}
{{- end -}}

{{/* The Secret with the key that jobs' tokens are made with. */}}
{{- define "kuberoll.tokenKey" -}}
{{- .Values.jobs.tokenKey.existingSecret | default (printf "%s-token-key" (include "kuberoll.fullname" .)) -}}
{{- end -}}

{{- define "kuberoll.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "kuberoll.operator" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "kuberoll.image" -}}
{{- $image := .Values.image -}}
{{- $repository := $image.repository -}}
{{- if $image.registry }}{{ $repository = printf "%s/%s" $image.registry $repository }}{{ end -}}
{{- $tag := default .Chart.AppVersion $image.tag -}}
{{- if $image.digest -}}
{{- printf "%s:%s@%s" $repository $tag $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository $tag -}}
{{- end -}}
{{- end -}}

{{/* An image of jobs' pods: what is given, or the chart's own of that role. */}}
{{- define "kuberoll.jobImage" -}}
{{- $root := index . 0 -}}
{{- $given := index . 1 -}}
{{- $role := index . 2 -}}
{{- if $given -}}
{{- $given -}}
{{- else -}}
{{- $repository := printf "kuberoll/%s" $role -}}
{{- with $root.Values.image.registry }}{{ $repository = printf "%s/%s" . $repository }}{{ end -}}
{{- printf "%s:%s" $repository $root.Chart.AppVersion -}}
{{- end -}}
{{- end -}}
