//go:build tools

// Package kuberay pins the KubeRay operator that the tests build.
package kuberay

import _ "github.com/ray-project/kuberay/ray-operator"
