variable "bucket" {
  description = "Name of the bucket for code, data and artefacts"
  type        = string
}

variable "region" {
  description = "Region where the jobs run"
  type        = string
}

variable "role" {
  description = "Name of the execution role; the launcher's policy is named after it"
  type        = string
  default     = "accel-training"
}

variable "secrets" {
  description = "How the names of the secrets and parameters begin that jobs may read"
  type        = string
  default     = "accel/"
}

variable "tags" {
  description = "Tags of everything that is made"
  type        = map(string)
  default     = {}
}
