-- Health check of DriverBuilds for Argo CD: `resource.customizations.health.farrier.dev_DriverBuild` in ConfigMap argocd-cm.
local health = {
  published = "Healthy",
  ["own-driver"] = "Healthy",
  skipped = "Healthy",
  building = "Progressing",
  queued = "Progressing",
  missing = "Progressing",
  waiting = "Progressing",
  retrying = "Progressing",
  failed = "Degraded",
  conflict = "Degraded",
  unknown = "Unknown",
}
local status = obj.status
if status == nil or status.phase == nil then
  return { status = "Progressing", message = "farrier has not looked at it yet" }
end
local message = status.phase
if status.message ~= nil and status.message ~= "" then
  message = message .. ": " .. status.message
end
return { status = health[status.phase] or "Unknown", message = message }
