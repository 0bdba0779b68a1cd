variable "project" {
  description = "Google Cloud project, which should have nothing else in it"
  type        = string
}

variable "region" {
  description = "Region of the bucket, that of the zone"
  type        = string
}

variable "zone" {
  description = "Zone of the slices"
  type        = string
}

variable "bucket" {
  description = "Name of the bucket for checkpoints"
  type        = string
}

variable "account" {
  description = "Name of the service account as which slices act"
  type        = string
  default     = "accel-slice"
}

variable "launchers" {
  description = "Who runs accel: user:ADDRESS, group:ADDRESS, serviceAccount:ADDRESS"
  type        = list(string)
  default     = []
}

variable "keep_days" {
  description = "After how many days what is in the bucket is deleted; 0 is never"
  type        = number
  default     = 0
}

variable "slice" {
  description = "Name of a slice that stays; null is none"
  type        = string
  default     = null
}

variable "accelerator_type" {
  description = "Of that slice"
  type        = string
  default     = "v4-32"
}

variable "runtime_version" {
  description = "Of that slice"
  type        = string
  default     = "tpu-ubuntu2204-base"
}

variable "network" {
  description = "Of that slice"
  type        = string
  default     = "default"
}
