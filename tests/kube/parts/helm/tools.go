//go:build tools

// Package helm pins the helm that the tests build.
package helm

import _ "helm.sh/helm/v3/cmd/helm"
