# The bucket for checkpoints, the service account of slices, the rights of both and of launchers, and a slice.

terraform {
  required_version = ">= 1.5"

  required_providers {
    google = {
      source  = "hashicorp/google"
      version = ">= 6.0"
    }
  }
}

locals {
  slice    = jsondecode(file("${path.module}/slice.json"))
  launcher = jsondecode(file("${path.module}/launcher.json"))
}

resource "google_storage_bucket" "checkpoints" {
  project                     = var.project
  name                        = var.bucket
  location                    = var.region
  uniform_bucket_level_access = true
  public_access_prevention    = "enforced"

  # accel removes nothing there. 0 keeps everything.
  dynamic "lifecycle_rule" {
    for_each = var.keep_days > 0 ? [var.keep_days] : []

    content {
      action {
        type = "Delete"
      }

      condition {
        age = lifecycle_rule.value
      }
    }
  }
}

resource "google_service_account" "slice" {
  project      = var.project
  account_id   = var.account
  display_name = "Slices of accel"
}

resource "google_project_iam_custom_role" "slice" {
  project     = var.project
  role_id     = "accelSlice"
  title       = local.slice.title
  description = local.slice.description
  permissions = local.slice.includedPermissions
}

resource "google_project_iam_custom_role" "launcher" {
  project     = var.project
  role_id     = "accelLauncher"
  title       = local.launcher.title
  description = local.launcher.description
  permissions = local.launcher.includedPermissions
}

resource "google_project_iam_member" "slice" {
  project = var.project
  role    = google_project_iam_custom_role.slice.id
  member  = google_service_account.slice.member
}

resource "google_project_iam_member" "logs" {
  project = var.project
  role    = "roles/logging.logWriter"
  member  = google_service_account.slice.member
}

resource "google_storage_bucket_iam_member" "slice" {
  bucket = google_storage_bucket.checkpoints.name
  role   = "roles/storage.objectUser"
  member = google_service_account.slice.member
}

resource "google_project_iam_member" "launcher" {
  for_each = toset(var.launchers)
  project  = var.project
  role     = google_project_iam_custom_role.launcher.id
  member   = each.value
}

# A slice acts as its account only if who creates it may act as that account.
resource "google_service_account_iam_member" "launcher" {
  for_each           = toset(var.launchers)
  service_account_id = google_service_account.slice.name
  role               = "roles/iam.serviceAccountUser"
  member             = each.value
}

# A slice that stays, for targets with `name`. accel creates those of targets with `accelerator_type` itself.
resource "google_tpu_v2_vm" "slice" {
  count            = var.slice == null ? 0 : 1
  project          = var.project
  zone             = var.zone
  name             = var.slice
  accelerator_type = var.accelerator_type
  runtime_version  = var.runtime_version

  # The hosts tell their SSH host keys.
  metadata = {
    enable-guest-attributes = "TRUE"
  }

  network_config {
    network             = var.network
    enable_external_ips = true
  }

  service_account {
    email = google_service_account.slice.email
    scope = ["https://www.googleapis.com/auth/cloud-platform"]
  }
}
