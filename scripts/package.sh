#!/usr/bin/env bash
# Makes the Debian packages from built programs. The same programs and commit give the same bytes.
set -euo pipefail
umask 022

usage() {
    cat <<'TEXT'
Usage: scripts/package.sh --programs DIR --out DIR [--version VERSION] [--compression TYPE]

Makes holdfast_VERSION_ARCH.deb and holdfast-bench_VERSION_ARCH.deb in the folder of
--out, from the programs in the folder of --programs. The default of VERSION is the
workspace's with the revision -1; of TYPE, as of dpkg-deb -Z, xz. Times in the packages
are SOURCE_DATE_EPOCH, by default the time of the last commit.
TEXT
}

root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
architecture=$(dpkg --print-architecture)

stop() {
    printf 'package: %s\n' "$*" >&2
    exit 1
}

main() {
    programs='' out='' version='' compression=xz
    while (($#)); do
        case $1 in
            --programs) programs=$2 ;;
            --out) out=$2 ;;
            --version) version=$2 ;;
            --compression) compression=$2 ;;
            -h | --help) usage && exit ;;
            *) usage >&2 && exit 2 ;;
        esac
        shift 2
    done
    [[ -n $programs && -n $out ]] || { usage >&2 && exit 2; }
    version=${version:-$(sed -n 's/^version = "\(.*\)"$/\1/p' "$root/Cargo.toml" | head -n 1)-1}
    : "${SOURCE_DATE_EPOCH:=$(git -c safe.directory='*' -C "$root" log -1 --format=%ct)}"
    [[ -n $SOURCE_DATE_EPOCH ]] || stop "outside a git checkout, SOURCE_DATE_EPOCH must be set"
    export SOURCE_DATE_EPOCH
    mkdir -p "$out"
    work=$(mktemp -d "${TMPDIR:-/tmp}/holdfast-package.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    write_manual_pages
    stage_holdfast
    build_package holdfast control
    stage_bench
    build_package holdfast-bench control-bench
}

# The pages of `holdfast bench`, `demo` and `repro` belong to the program that has these commands.
write_manual_pages() {
    mkdir "$work/man" "$work/man-bench"
    "$programs/holdfast" man "$work/man"
    "$programs/holdfast-bench" man "$work/man-bench"
    local page
    for page in "$work/man-bench"/*; do
        rm -f "$work/man/$(basename "$page")"
    done
    install -m 644 "$root"/packaging/man/*.8 "$work/man/"
}

stage_holdfast() {
    local tree=$work/holdfast shell name
    install_programs "$tree" holdfast holdfastd rserpoold
    install_manual_pages "$tree" "$work/man"
    declare -A completion=(
        [bash]=usr/share/bash-completion/completions/holdfast
        [zsh]=usr/share/zsh/vendor-completions/_holdfast
        [fish]=usr/share/fish/vendor_completions.d/holdfast.fish
    )
    for shell in "${!completion[@]}"; do
        "$programs/holdfast" completions "$shell" >"$work/completion"
        install -D -m 644 "$work/completion" "$tree/${completion[$shell]}"
    done
    install -D -m 644 -t "$tree/lib/systemd/system" "$root"/packaging/systemd/*.service
    install -D -m 644 "$root/packaging/systemd/sysusers.conf" "$tree/usr/lib/sysusers.d/holdfast.conf"
    install -D -m 644 "$root/packaging/systemd/tmpfiles.conf" "$tree/usr/lib/tmpfiles.d/holdfast.conf"
    install -D -m 644 -t "$tree/etc/holdfast" "$root"/packaging/etc/*.toml
    install -m 644 "$root/docs/holdfast.example.toml" "$tree/etc/holdfast/holdfast.toml.example"
    install -d -m 755 "$tree/etc/holdfast/checks"
    install_documents "$tree" holdfast
    for name in install joining group services health proxy configuration handoff metrics migration limits pools rsplib lab \
        simulation; do
        install -m 644 "$root/docs/$name.md" "$tree/usr/share/doc/holdfast/"
    done
    install -D -m 644 -t "$tree/usr/share/doc/holdfast/examples" "$root/packaging/systemd/migration.conf"
    mkdir "$tree/DEBIAN"
    install -m 755 -t "$tree/DEBIAN" "$root"/packaging/debian/{postinst,prerm,postrm}
    (cd "$tree" && find etc -type f -printf '/%p\n') | sort >"$tree/DEBIAN/conffiles"
}

stage_bench() {
    local tree=$work/holdfast-bench
    install_programs "$tree" holdfast-bench
    install_manual_pages "$tree" "$work/man-bench"
    install_documents "$tree" holdfast-bench
    mkdir "$tree/DEBIAN"
}

# install_programs TREE NAME...: without symbols, which `./x build` has put beside the programs.
install_programs() {
    local tree=$1 name
    shift
    mkdir -p "$tree/usr/bin"
    for name in "$@"; do
        [[ -x $programs/$name ]] || stop "$programs has no program $name"
        if readelf --sections --wide "$programs/$name" | grep '\.symtab' >/dev/null; then
            objcopy --strip-all "$programs/$name" "$tree/usr/bin/$name"
        else
            install -m 755 "$programs/$name" "$tree/usr/bin/$name"
        fi
        chmod 755 "$tree/usr/bin/$name"
    done
}

install_manual_pages() {
    local page
    for page in "$2"/*; do
        install -D -m 644 -t "$1/usr/share/man/man${page##*.}" "$page"
    done
    find "$1/usr/share/man" -type f -exec gzip -9 --no-name {} +
}

install_documents() {
    local folder=$1/usr/share/doc/$2
    install -D -m 644 -t "$folder" "$root/packaging/debian/copyright"
    gzip -9 --no-name --stdout "$root/CHANGELOG.md" >"$folder/changelog.gz"
    {
        printf '%s (%s) bookworm; urgency=medium\n\n' "$2" "$version"
        printf '  * Packaged from the source of this version; changelog.gz has its changes.\n\n'
        printf ' -- Holdfast maintainers <maintainers@holdfast.example>  '
        LC_ALL=C date --utc --date "@$SOURCE_DATE_EPOCH" '+%a, %d %b %Y %H:%M:%S +0000'
    } | gzip -9 --no-name >"$folder/changelog.Debian.gz"
}

# build_package NAME CONTROL: from the tree of that name.
build_package() {
    local name=$1 tree=$work/$1 libraries size
    # dpkg-shlibdeps wants to stand in the source of a package.
    mkdir -p "$work/source/debian"
    printf 'Source: holdfast\n\nPackage: %s\nArchitecture: any\n' "$name" >"$work/source/debian/control"
    libraries=$(cd "$work/source" && dpkg-shlibdeps -O "$tree"/usr/bin/* 2>"$work/shlibdeps") ||
        { cat "$work/shlibdeps" >&2 && stop "dpkg-shlibdeps failed"; }
    size=$(du --apparent-size -k --summarize --exclude DEBIAN "$tree" | cut -f 1)
    sed -e "s/@VERSION@/$version/; s/@ARCHITECTURE@/$architecture/; s/@INSTALLED_SIZE@/$size/" \
        -e "s/@LIBRARIES@/${libraries#shlibs:Depends=}/" "$root/packaging/debian/$2" >"$tree/DEBIAN/control"
    (cd "$tree" && find . -path ./DEBIAN -prune -o -type f -printf '%P\0' | sort --zero-terminated |
        xargs --null md5sum) >"$tree/DEBIAN/md5sums"
    chmod 644 "$tree"/DEBIAN/{control,md5sums}
    find "$tree" -exec touch --no-dereference --date "@$SOURCE_DATE_EPOCH" {} +
    # One thread, since xz cuts its blocks by their number.
    dpkg-deb --root-owner-group --threads-max=1 "-Z$compression" --build "$tree" \
        "$out/${name}_${version}_$architecture.deb" >/dev/null
}

main "$@"
