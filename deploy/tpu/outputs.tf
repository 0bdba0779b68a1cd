output "service_account" {
  description = "service_account: of the target in accel.yaml"
  value       = google_service_account.slice.email
}

output "checkpoint_uri" {
  description = "checkpoint_uri: of the target in accel.yaml"
  value       = "${google_storage_bucket.checkpoints.url}/checkpoints/{id}"
}

output "name" {
  description = "name: of the target in accel.yaml, where there is a slice that stays"
  value       = one(google_tpu_v2_vm.slice[*].name)
}
