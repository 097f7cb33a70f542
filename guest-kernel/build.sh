#!/usr/bin/env bash
#
# Build the CubeVMM guest kernel from a packaged Linux source and the
# configuration fragments next to this script. See README.md.

set -euo pipefail

readonly PREFERRED_VERSION=6.12
readonly MINIMUM_VERSION=6.6
readonly SIZE_LIMIT_MB=20
readonly DISK_NEEDED_MB=3000
readonly PROGRESS_SECONDS=15
readonly BUILD_PACKAGES=(
    gcc make binutils flex bison bc libelf-dev xz-utils tar gzip diffutils perl-base
)

SCRIPT=$(realpath "${BASH_SOURCE[0]}")
HERE=$(dirname "$SCRIPT")
REPOSITORY=$(dirname "$HERE")
FRAGMENT_DIR=$(realpath -m "${KERNEL_FRAGMENTS:-$HERE/fragments}")
TARBALL_DIR=${KERNEL_TARBALLS:-/usr/src}
JOBS=${JOBS:-$(nproc)}
STARTED=$SECONDS

install_packages=no
check_only=no

# Set by the functions below.
tarball=       # packaged source archive, or empty
source_tree=   # unpacked source
version=       # MAJOR.MINOR of the source
fragments=()   # files with the options to set
work=          # scratch directory of this run
log=           # full output of the tools
make_kernel=() # how to call make in it
make_pid=      # while it compiles

usage() {
    cat <<TEXT
Usage: build.sh [--install-packages] [--check-config] [--help]

Builds the guest kernel, or finds it in the cache, and prints the path of the
finished vmlinux as the only line on standard output. Progress and errors go to
standard error.

Options:
  --install-packages  first install what is missing of the build tools and a Linux
                      source package, with apt-get (and sudo if not root)
  --check-config      only make the configuration and check that every option
                      came out as asked; compiles and prints nothing
  --help              show this text

Environment:
  KERNEL            use this ready kernel (ELF or bzImage) and build nothing
  KERNEL_SRC        build from this source tree; it is never written to
  KERNEL_FRAGMENTS  take the fragments from this directory
  KERNEL_TARBALLS   look for linux-source-*.tar.* here (now: $TARBALL_DIR)
  CUBE_CACHE        cache directory (now: $(cache_root))
  JOBS              parallel compiler processes (now: $JOBS)
  CARGO_TARGET_DIR  where the guest/vmlinux link is put (now: $(target_dir))
TEXT
}

cache_root() {
    if [[ -n ${CUBE_CACHE:-} ]]; then
        realpath -m "$CUBE_CACHE"
    elif [[ -n ${XDG_CACHE_HOME:-} ]]; then
        realpath -m "$XDG_CACHE_HOME/cubevmm"
    elif [[ -n ${HOME:-} ]]; then
        realpath -m "$HOME/.cache/cubevmm"
    else
        die 'no place for the cache: set CUBE_CACHE, XDG_CACHE_HOME or HOME'
    fi
}

target_dir() {
    realpath -m "${CARGO_TARGET_DIR:-$REPOSITORY/target}"
}

clock() {
    local t=$((SECONDS - STARTED))
    printf '%02d:%02d' $((t / 60)) $((t % 60))
}

say() {
    printf '[%s] %s\n' "$(clock)" "$*" >&2
}

die() {
    printf 'build.sh: %s\n' "$*" >&2
    exit 1
}

# A step failed: show the end of its output and say where the rest is.
die_with_log() {
    printf 'build.sh: %s; the last lines of %s:\n' "$1" "$log" >&2
    tail -n 25 "$log" | sed 's/^/    /' >&2
    exit 1
}

at_least() { # VERSION MINIMUM
    [[ $(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n 1) == "$2" ]]
}

cleanup() {
    if [[ -n $make_pid ]]; then
        kill "$make_pid" 2>/dev/null || true
        wait "$make_pid" 2>/dev/null || true
    fi
    if [[ -n $work ]]; then
        rm -rf "$work"
    fi
}

# --- A ready kernel given by the caller ----------------------------------------

bytes_at() { # FILE OFFSET COUNT
    od -An -v -tx1 -j "$2" -N "$3" "$1" 2>/dev/null | tr -d ' \n'
}

use_given_kernel() {
    local path=$1
    [[ -e $path ]] || die "KERNEL=$path: no such file"
    [[ -f $path ]] || die "KERNEL=$path: not a regular file"
    [[ -r $path ]] || die "KERNEL=$path: not readable"
    if [[ $(bytes_at "$path" 0 4) == 7f454c46 ]]; then
        # Class at 4: 64-bit; type at 16: fixed address; machine at 18: x86-64.
        if [[ $(bytes_at "$path" 4 1) != 02 || $(bytes_at "$path" 16 4) != 02003e00 ]]; then
            die "KERNEL=$path: an ELF file, but not an x86-64 kernel"
        fi
    elif [[ $(bytes_at "$path" 514 4) != 48647253 ]]; then # "HdrS"
        die "KERNEL=$path: neither an ELF kernel nor a bzImage"
    fi
    realpath -s "$path"
}

# --- What is needed ------------------------------------------------------------

newest_packaged_source() {
    local name best=
    while read -r name; do
        name=${name#linux-source-}
        if [[ $name == "$PREFERRED_VERSION" ]]; then
            best=$name
            break
        fi
        at_least "$name" "$MINIMUM_VERSION" || continue
        if [[ -z $best ]] || at_least "$name" "$best"; then
            best=$name
        fi
    done < <(apt-cache pkgnames linux-source- 2>/dev/null | grep -xE 'linux-source-[0-9]+\.[0-9]+')
    [[ -n $best ]] && printf 'linux-source-%s\n' "$best"
}

# Install what is missing; a machine that has everything is left alone.
install_what_is_missing() {
    local package missing=() as_root=() install
    command -v apt-get >/dev/null || die '--install-packages needs apt-get, which is not here'
    for package in "${BUILD_PACKAGES[@]}"; do
        is_installed "$package" || missing+=("$package")
    done
    if [[ -z ${KERNEL_SRC:-} ]] && ! (find_source) 2>/dev/null; then
        missing+=(source)
    fi
    ((${#missing[@]})) || return 0
    if [[ $(id -u) != 0 ]]; then
        command -v sudo >/dev/null || die '--install-packages needs root, or sudo'
        as_root=(sudo)
    fi
    if [[ ${missing[-1]} == source ]] && ! package=$(newest_packaged_source); then
        say 'updating the package lists'
        "${as_root[@]}" apt-get update >&2 || die 'apt-get update failed'
        package=$(newest_packaged_source) ||
            die "apt offers no linux-source package of version $MINIMUM_VERSION or later"
    fi
    if [[ ${missing[-1]} == source ]]; then
        missing[-1]=$package
    fi
    say "installing ${missing[*]}"
    install=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive
        apt-get install -y --no-install-recommends "${missing[@]}")
    # The package lists may be absent or name versions that are gone.
    "${install[@]}" >&2 || { "${as_root[@]}" apt-get update && "${install[@]}"; } >&2 ||
        die "apt-get could not install ${missing[*]}"
}

is_installed() {
    [[ $(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null) == installed ]]
}

check_tools() {
    local pair tool package missing=() packages=()
    for pair in gcc:gcc make:make ld:binutils readelf:binutils strip:binutils flex:flex \
        bison:bison bc:bc perl:perl-base gzip:gzip cmp:diffutils tar:tar xz:xz-utils \
        flock:util-linux; do
        tool=${pair%%:*} package=${pair#*:}
        if ! command -v "$tool" >/dev/null; then
            missing+=("$tool")
            packages+=("$package")
        fi
    done
    if command -v gcc >/dev/null &&
        ! echo '#include <gelf.h>' | gcc -E -x c -o /dev/null - 2>/dev/null; then
        missing+=(gelf.h)
        packages+=(libelf-dev)
    fi
    if ((${#missing[@]})); then
        die "missing build tools: ${missing[*]} (apt-get install $(printf '%s\n' "${packages[@]}" | sort -u | paste -sd ' '))"
    fi
}

find_source() {
    local file name best=
    if [[ -n ${KERNEL_SRC:-} ]]; then
        [[ -f $KERNEL_SRC/Kconfig && -f $KERNEL_SRC/Makefile ]] ||
            die "KERNEL_SRC=$KERNEL_SRC: not a Linux source tree"
        source_tree=$(realpath "$KERNEL_SRC")
        if [[ -e $source_tree/.config || -d $source_tree/include/config ||
            -d $source_tree/arch/x86/include/generated ]]; then
            die "KERNEL_SRC=$KERNEL_SRC: was built in place, which rules out a build outside of it (run 'make mrproper' there)"
        fi
        version=$(awk -F ' *= *' '$1 == "VERSION" { v = $2 } $1 == "PATCHLEVEL" { print v "." $2; exit }' \
            "$source_tree/Makefile")
        at_least "$version" "$MINIMUM_VERSION" ||
            die "KERNEL_SRC=$KERNEL_SRC: version $version is older than $MINIMUM_VERSION"
        return
    fi
    for file in "$TARBALL_DIR"/linux-source-*.tar.*; do
        [[ -f $file ]] || continue
        name=${file##*/linux-source-}
        name=${name%.tar.*}
        [[ $name =~ ^[0-9]+\.[0-9]+$ ]] || continue
        at_least "$name" "$MINIMUM_VERSION" || continue
        if [[ $name == "$PREFERRED_VERSION" ]]; then
            best=$name tarball=$file
            break
        fi
        if [[ -z $best ]] || at_least "$name" "$best"; then
            best=$name tarball=$file
        fi
    done
    [[ -n $best ]] || die "no Linux source of version $MINIMUM_VERSION or later in $TARBALL_DIR:" \
        "apt-get install linux-source-$PREFERRED_VERSION, or run with --install-packages"
    version=$best
}

# --- Fragments -----------------------------------------------------------------

choose_fragments() {
    local file
    for file in "$FRAGMENT_DIR"/*.config; do
        [[ -f $file ]] || die "no fragments (*.config) in $FRAGMENT_DIR"
        fragments+=("$file")
    done
}

# Print "OPTION<tab>VALUE<tab>FILE:LINE" for each line of the fragments; refuse
# lines that are not configuration, and one option asked for in two ways.
requested_options() {
    awk -v OFS='\t' '
        function complain(text) {
            printf "build.sh: %s:%d: %s\n", name, FNR, text > "/dev/stderr"
            bad = 1
        }
        FNR == 1 { name = FILENAME; sub(/.*\//, "", name) }
        { sub(/[ \t\r]+$/, "") }
        /^CONFIG_[A-Za-z0-9_]+=./ {
            option = substr($0, 1, index($0, "=") - 1)
            value = substr($0, index($0, "=") + 1)
        }
        /^# CONFIG_[A-Za-z0-9_]+ is not set$/ { option = $2; value = "n" }
        option == "" {
            if ($0 != "" && $0 !~ /^#/) complain("not a configuration line: " $0)
            next
        }
        {
            if (option in seen && seen[option] != value)
                complain(option " is " value " here and " seen[option] " at " place[option])
            else if (option in seen)
                complain(option " is already at " place[option])
            seen[option] = value
            place[option] = name ":" FNR
            print option, value, place[option]
            option = ""
        }
        END { exit bad }
    ' "${fragments[@]}"
}

# Compare the finished configuration with the fragments, and name each
# difference. An option that the source does not have counts as "not set"; only
# fragments called *-if-known.config may ask for such options.
check_configuration() { # REQUESTED CONFIG
    local option value place found reason wrong=0
    local known=$work/known unknown=()
    find "$source_tree" -name 'Kconfig*' -type f -exec cat {} + |
        awk '$1 == "config" || $1 == "menuconfig" { print $2 }' | sort -u >"$known"
    while IFS=$'\t' read -r option value found place; do
        reason='a dependency is missing, or another option forces it'
        if ! grep -qxF "${option#CONFIG_}" "$known"; then
            if [[ $place == *-if-known.config:* ]]; then
                unknown+=("$option")
                continue
            fi
            reason="Linux $version has no such option"
        fi
        printf 'build.sh: %s: %s asked for %s, got %s (%s)\n' "$place" "$option" \
            "$(readable "$value")" "$(readable "$found")" "$reason" >&2
        wrong=$((wrong + 1))
    done < <(awk -F '\t' -v OFS='\t' '
        NR == FNR {
            if (/^CONFIG_/) got[substr($0, 1, index($0, "=") - 1)] = substr($0, index($0, "=") + 1)
            next
        }
        { found = ($1 in got) ? got[$1] : "n" }
        found != $2 { print $1, $2, found, $3 }
    ' "$2" "$1")
    ((wrong == 0)) || die "$wrong of the requested options did not come out as asked"
    if ((${#unknown[@]})); then
        say "left out, as Linux $version does not have them: ${unknown[*]}"
    fi
}

readable() {
    if [[ $1 == n ]]; then echo 'not set'; else echo "$1"; fi
}

# --- Building ------------------------------------------------------------------

source_identity() {
    if [[ -n $tarball ]]; then
        stat -c '%s %Y' "$tarball"
        basename "$tarball"
        dpkg-query -W -f '${Version}\n' "linux-source-$version" 2>/dev/null || true
    else
        find "$source_tree" -name .git -prune -o -type f -printf '%P %s %T@\n' | LC_ALL=C sort
    fi
}

cache_key() {
    local file
    {
        cat "$SCRIPT"
        for file in "${fragments[@]}"; do
            basename "$file"
            cat "$file"
        done
        source_identity
        gcc --version
        ld --version
    } | sha256sum | cut -c 1-20
}

unpack() {
    [[ -n $tarball ]] || return 0
    say "unpacking $(basename "$tarball")"
    mkdir "$work/source"
    # Left out: large parts that no x86 kernel without a graphics card reads.
    tar -xf "$tarball" -C "$work/source" --strip-components=1 \
        --exclude='*/drivers/gpu/drm/amd/include/asic_reg' \
        --exclude='*/Documentation/devicetree' --exclude='*/tools/testing' \
        --exclude='*/tools/perf' >>"$log" 2>&1 || die_with_log "could not unpack $tarball"
    source_tree=$work/source
}

# Start from nothing, set what the fragments say, and let the dependencies of
# those options settle.
configure() {
    say "configuring Linux $version from ${#fragments[@]} fragments"
    mkdir "$work/build"
    make_kernel=(make -C "$source_tree" O="$work/build" ARCH=x86
        KBUILD_BUILD_USER=cubevmm KBUILD_BUILD_HOST=cubevmm
        KBUILD_BUILD_VERSION=1 KBUILD_BUILD_TIMESTAMP='Thu Jan 1 00:00:00 UTC 1970')
    requested_options >"$work/requested" || die 'the fragments contradict themselves'
    {
        "${make_kernel[@]}" allnoconfig
        # Merging only concatenates here: conflicts were refused above.
        (cd "$work/build" && "$source_tree/scripts/kconfig/merge_config.sh" -m -O "$work" \
            "${fragments[@]}" && mv "$work/.config" "$work/merged")
        # With the merged file as the preset, allnoconfig says no to every
        # option that only became visible through an option of the fragments.
        "${make_kernel[@]}" KCONFIG_ALLCONFIG="$work/merged" allnoconfig
        "${make_kernel[@]}" olddefconfig
    } >>"$log" 2>&1 || die_with_log 'the configuration could not be made'
    check_configuration "$work/requested" "$work/build/.config"
    say "configuration is as asked: $(grep -c '=y$' "$work/build/.config") options on"
}

compiled_objects() {
    grep -cE '^  (CC|AS) ' "$log" 2>/dev/null || true
}

compile() {
    local begun=$SECONDS seconds next=$PROGRESS_SECONDS status=0
    say "compiling with $JOBS processes"
    "${make_kernel[@]}" -j "$JOBS" vmlinux >>"$log" 2>&1 9>&- &
    make_pid=$!
    while kill -0 "$make_pid" 2>/dev/null; do
        sleep 1
        seconds=$((SECONDS - begun))
        if ((seconds >= next)); then
            printf '  compiling: %d objects, %02d:%02d\n' \
                "$(compiled_objects)" $((seconds / 60)) $((seconds % 60)) >&2
            next=$((seconds + PROGRESS_SECONDS))
        fi
    done
    wait "$make_pid" || status=$?
    make_pid=
    ((status == 0)) || die_with_log "the compilation failed (exit code $status)"
    seconds=$((SECONDS - begun))
    say "$(printf 'compiled %d objects in %02d:%02d' "$(compiled_objects)" \
        $((seconds / 60)) $((seconds % 60)))"
}

finish() {
    local file=$work/done/vmlinux size
    say 'stripping and checking the image'
    mkdir "$work/done"
    strip --strip-all -o "$file" "$work/build/vmlinux" >>"$log" 2>&1 ||
        die_with_log 'the image could not be stripped'
    # The note that holds the PVH entry point: owner Xen, type 18.
    LC_ALL=C readelf -nW "$file" 2>>"$log" | grep -qE '^ +Xen .*0x0*12\)?' ||
        die 'the image has no PVH entry note, so it could not be booted directly'
    size=$(stat -c %s "$file")
    if ((size > SIZE_LIMIT_MB * 1000000)); then
        say "warning: the image has $size bytes, more than the intended $SIZE_LIMIT_MB MB;" \
            'each boot copies it into guest memory'
    fi
    cp "$work/build/.config" "$work/done/config"
    chmod 444 "$file" "$work/done/config"
    say "done: Linux $(cat "$work/build/include/config/kernel.release"), $size bytes"
}

build_into() { # DIRECTORY
    local directory=$1 available
    available=$(df -Pm "$(dirname "$directory")" | awk 'NR == 2 { print $4 }')
    ((available >= DISK_NEEDED_MB)) ||
        die "building takes $DISK_NEEDED_MB MB of disk space in $(dirname "$directory"), $available are free (CUBE_CACHE moves the cache)"
    check_tools
    # The lock is held, so whatever an interrupted run left is nobody's.
    rm -rf "$directory" "$directory".work.*
    work=$(mktemp -d "$directory.work.XXXXXX")
    : >"$log"
    unpack
    configure
    if [[ $check_only == yes ]]; then
        return
    fi
    compile
    finish
    mv "$log" "$work/done/build.log"
    mv -T "$work/done" "$directory"
}

# Descriptor 9 is the lock file.
wait_for_lock() {
    flock -n 9 && return
    say 'the same kernel is being built already; waiting for it'
    until flock -w "$PROGRESS_SECONDS" 9; do
        say "still waiting: $(compiled_objects) objects compiled there so far"
    done
}

link_result() { # VMLINUX
    local directory temporary
    directory=$(target_dir)/guest
    temporary=$directory/.vmlinux.$$
    if ! { mkdir -p "$directory" && ln -sfn "$1" "$temporary" &&
        mv -fT "$temporary" "$directory/vmlinux"; } 2>/dev/null; then
        say "warning: could not make the link $directory/vmlinux"
    fi
}

main() {
    local argument cache directory key
    for argument in "$@"; do
        case $argument in
            --help | -h)
                usage
                exit 0
                ;;
            --install-packages) install_packages=yes ;;
            --check-config) check_only=yes ;;
            *) die "unknown argument '$argument' (see --help)" ;;
        esac
    done
    if [[ -n ${KERNEL:-} ]]; then
        use_given_kernel "$KERNEL"
        exit 0
    fi
    [[ $(uname -m) == x86_64 ]] || die 'the guest kernel is built on x86-64 only'
    [[ $JOBS =~ ^[1-9][0-9]*$ ]] || die "JOBS=$JOBS: not a number of processes"
    # Nothing from the caller's environment may steer the kernel's makefiles.
    unset ARCH CROSS_COMPILE KBUILD_OUTPUT KCONFIG_CONFIG KCONFIG_ALLCONFIG MAKEFLAGS MAKELEVEL \
        MFLAGS KCFLAGS KCPPFLAGS KAFLAGS LOCALVERSION CC HOSTCC CFLAGS LDFLAGS LLVM
    export LC_ALL=C TZ=UTC
    exec </dev/null

    if [[ $install_packages == yes ]]; then
        install_what_is_missing
    fi
    find_source
    choose_fragments
    # The key names their versions, so these two are needed even on a hit.
    if ! { command -v gcc && command -v ld; } >/dev/null; then
        check_tools
    fi
    cache=$(cache_root)/kernel
    if [[ $cache$source_tree =~ [[:space:]:] ]]; then
        die "the kernel's makefiles cannot work in a path with spaces or colons: $cache $source_tree"
    fi
    mkdir -p "$cache" || die "cannot write to the cache directory $cache (CUBE_CACHE moves it)"
    key=$(cache_key)
    if [[ $check_only == yes ]]; then
        key=check-config # never filled, so never found
    fi
    directory=$cache/$key
    log=$directory.log

    if [[ ! -f $directory/vmlinux ]]; then
        trap cleanup EXIT
        trap 'exit 129' HUP
        trap 'exit 130' INT
        trap 'exit 143' TERM
        exec 9>"$directory.lock"
        wait_for_lock
        # It may have been finished meanwhile.
        if [[ ! -f $directory/vmlinux ]]; then
            build_into "$directory"
        fi
    fi
    if [[ $check_only == yes ]]; then
        rm -f "$log"
        exit 0
    fi
    link_result "$directory/vmlinux"
    printf '%s\n' "$directory/vmlinux"
}

main "$@"
