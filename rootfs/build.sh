#!/usr/bin/env bash
#
# Build the root image of a CubeVMM guest: an initramfs with cube-agent as /init and a static
# busybox, with --containers also cube-oci. See README.md.

set -euo pipefail
export LC_ALL=C

SCRIPT=$(realpath "${BASH_SOURCE[0]}")
HERE=$(dirname "$SCRIPT")
REPOSITORY=$(dirname "$HERE")
TRIPLE=$(uname -m)-unknown-linux-gnu

# A small file compiles and starts as fast as a fast one here; its size is memory of every guest.
readonly SMALL_PROFILE=(
    --config 'profile.release.opt-level="s"'
    --config 'profile.release.strip="symbols"'
)
readonly STATIC='-C target-feature=+crt-static'
readonly DIRECTORIES=(
    bin dev etc/cube home lib/modules mnt opt proc root run sbin srv sys tmp
    usr/bin usr/local/bin usr/local/sbin usr/sbin usr/share var/cache var/lib var/log var/tmp
)

modules_tree=
module_list=
output=
image=initrd.cpio # its name
additions=()      # HOSTPATH:GUESTPATH

# Set by the functions below.
work=     # scratch directory of this run
manifest= # what goes into the image, a line for each path, see `entry`
program=  # the last one built
busybox=

usage() {
    cat <<TEXT
Usage: build.sh [--containers] [--modules DIR --module-list FILE]
                [--add HOSTPATH:GUESTPATH]... [--output FILE] [--help]

Builds the guest's initramfs, or finds it in the cache, and prints its path as the only line on
standard output. Progress and errors go to standard error. Needs no root.

Options:
  --containers        build container.cpio instead of initrd.cpio: the same with cube-oci, which
                      runs OCI containers in the guest
  --modules DIR       modules for a stock kernel: its tree, as in /lib/modules/VERSION
  --module-list FILE  names of the modules to load at boot, one a line, in this order; what they
                      depend on is added (modules-stock.list is a good start)
  --add HOSTPATH:GUESTPATH
                      also put this file or directory into the image
  --output FILE       write the image to FILE instead of the cache, and set no link
  --help              show this text

Environment:
  BUSYBOX           the static busybox to use (default: one in PATH, or /bin/busybox)
  CUBE_AGENT        a ready agent to use instead of building one
  CUBE_OCI          a ready cube-oci to use instead of building one
  CUBE_CACHE        cache directory (now: $(cache_root))
  CARGO_TARGET_DIR  where programs are built and the link guest/initrd.cpio (or container.cpio)
                    is put
                    (now: $(target_dir))
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

say() {
    printf 'build.sh: %s\n' "$*" >&2
}

die() {
    say "$@"
    exit 1
}

parse_arguments() {
    while (($#)); do
        case $1 in
        --help)
            usage
            exit
            ;;
        --containers)
            image=container.cpio
            shift
            ;;
        --modules | --module-list | --output | --add)
            (($# >= 2)) || die "$1 needs a value"
            case $1 in
            --modules) modules_tree=$2 ;;
            --module-list) module_list=$2 ;;
            --output) output=$2 ;;
            --add)
                [[ $2 == ?*:/* ]] || die "--add $2: not HOSTPATH:/GUESTPATH"
                [[ -e ${2%:*} ]] || die "--add $2: no such file: ${2%:*}"
                additions+=("$2")
                ;;
            esac
            shift 2
            ;;
        *) die "no such option: $1; see --help" ;;
        esac
    done
    if [[ -n $modules_tree || -n $module_list ]]; then
        [[ -n $modules_tree && -n $module_list ]] || die '--modules and --module-list go together'
        [[ -d $modules_tree ]] || die "--modules $modules_tree: no such directory"
        [[ -f $module_list ]] || die "--module-list $module_list: no such file"
    fi
}

# --- What goes in ----------------------------------------------------------------

# program_key NAME: what a program of this repository is made of, as a hash: its sources, those of
# others, the compiler, and how it is called.
program_key() {
    {
        cd "$REPOSITORY"
        printf '%s\n' "$1" "$TRIPLE" "$STATIC" "${SMALL_PROFILE[@]}"
        rustc -vV
        find Cargo.toml Cargo.lock rootfs -type f \( -name '*.rs' -o -name '*.toml' -o -name '*.lock' \) \
            -print0 | sort -z | xargs -0 sha256sum
    } | sha256sum | cut -c 1-32
}

# build_program NAME READY: builds a static program of this repository, or finds it in the cache,
# unless READY, the value of the variable for it, names one. Sets `program`.
build_program() {
    local name=$1 ready=$2 directory
    if [[ -n $ready ]]; then
        [[ -f $ready ]] || die "$ready, to use as $name: no such file"
        program=$ready
        return
    fi
    command -v cargo >/dev/null || die "no cargo: install Rust, or name a ready $name, see --help"
    program=$(cache_root)/programs/$(program_key "$name")/$name
    [[ -s $program ]] && return
    directory=$(target_dir)/guest-build
    say "building $name in $directory"
    # Flags of the caller's are for the host. Paths are left out, so that the same source gives the
    # same binary wherever it lies.
    env -u CARGO_ENCODED_RUSTFLAGS -u CARGO_BUILD_TARGET -u CARGO_TARGET_DIR \
        RUSTFLAGS="$STATIC --remap-path-prefix=$REPOSITORY=. \
            --remap-path-prefix=${CARGO_HOME:-${HOME:-}/.cargo}=cargo" \
        cargo build --quiet --release --package "$name" --bin "$name" \
        --manifest-path "$REPOSITORY/Cargo.toml" --target "$TRIPLE" --target-dir "$directory" \
        "${SMALL_PROFILE[@]}" >&2 || die "$name does not build"
    mkdir -p "${program%/*}"
    cp "$directory/$TRIPLE/release/$name" "$program.$$"
    mv "$program.$$" "$program"
}

find_busybox() {
    busybox=${BUSYBOX:-$(command -v busybox || true)}
    busybox=${busybox:-/bin/busybox}
    [[ -x $busybox ]] || die "no busybox at $busybox: apt-get install busybox-static"
    # The path of a dynamic linker, which the guest does not have.
    if grep -qaF -e /lib64/ld-linux -e /lib/ld-linux -e /lib/ld-musl "$busybox"; then
        die "$busybox is not static: apt-get install busybox-static"
    fi
}

# entry TYPE MODE GUESTPATH [SOURCE]: a line of the manifest. TYPE is dir, file (SOURCE: host path),
# link (SOURCE: target) or node (SOURCE: MAJOR MINOR).
entry() {
    local path=${3#/}
    if [[ $path == *$'\n'* || $path == *$'\t'* || ${4:-} == *$'\n'* || ${4:-} == *$'\t'* ]]; then
        die "a path with a tab or newline in it: $path"
    fi
    printf '%s\t%s\t%s\t%s\n' "$path" "$1" "$2" "${4:-}" >>"$manifest"
}

add_file() { # HOSTPATH GUESTPATH
    local mode=0644
    [[ -r $1 ]] || die "$1: not readable"
    [[ -x $1 ]] && mode=0755
    entry file "$mode" "$2" "$1"
}

add_tree() { # HOSTPATH GUESTPATH
    local found relative
    while IFS= read -r -d '' found; do
        relative=${found#"$1"}
        relative=${2%/}$relative
        if [[ -L $found ]]; then
            entry link 0777 "$relative" "$(readlink "$found")"
        elif [[ -d $found ]]; then
            [[ -z ${relative#/} ]] || entry dir 0755 "$relative"
        elif [[ -f $found ]]; then
            add_file "$found" "$relative"
        else
            die "$found: neither file, directory nor link"
        fi
    done < <(find "$1" -print0 | sort -z)
}

add_base() {
    local directory applet
    for directory in "${DIRECTORIES[@]}"; do
        entry dir 0755 "$directory"
    done
    entry dir 0700 root
    entry dir 1777 tmp
    entry dir 1777 var/tmp
    # The kernel opens the one for init; the other is for the Rust runtime if it could not.
    entry node 0600 dev/console '5 1'
    entry node 0666 dev/null '1 3'
    build_program cube-agent "${CUBE_AGENT:-}"
    entry file 0755 init "$program"
    if [[ $image == container.cpio ]]; then
        build_program cube-oci "${CUBE_OCI:-}"
        entry file 0755 bin/cube-oci "$program"
    fi
    add_tree "$HERE/image" /
    entry file 0755 bin/busybox "$busybox"
    while read -r applet; do
        case $applet in
        linuxrc | */init | */busybox) ;; # the agent is what runs at boot
        *) entry link 0777 "$applet" /bin/busybox ;;
        esac
    done < <("$busybox" --list-full)
}

# Modules, unpacked, and the list of them that the agent loads.
add_modules() {
    local version root name line path target
    command -v modprobe >/dev/null || die 'no modprobe: apt-get install kmod'
    version=$(basename "$(realpath "$modules_tree")")
    # A root with nothing but this tree, where either layout of /lib finds it.
    root=$work/modules
    mkdir -p "$root/lib/modules" "$root/usr"
    ln -s ../lib "$root/usr/lib"
    ln -s "$(realpath "$modules_tree")" "$root/lib/modules/$version"
    if [[ ! -e $modules_tree/modules.dep.bin ]]; then
        depmod -b "$root" "$version" || die "depmod failed on $modules_tree"
    fi
    : >"$work/modules.list"
    while read -r name; do
        [[ -n $name && $name != '#'* ]] || continue
        modprobe -C /dev/null -d "$root" -S "$version" --show-depends "$name" \
            >"$work/depends" 2>"$work/errors" ||
            die "module $name of $version: $(head -n 1 "$work/errors")"
        while read -r line path _; do
            [[ $line == insmod ]] || continue # or builtin
            target=/lib/modules/${path##*/}
            target=${target%.xz} target=${target%.zst} target=${target%.gz}
            grep -qxF "$target" "$work/modules.list" && continue
            printf '%s\n' "$target" >>"$work/modules.list"
            unpack_module "$path" "$work/${target##*/}"
            entry file 0644 "$target" "$work/${target##*/}"
        done <"$work/depends"
    done <"$module_list"
    say "$(wc -l <"$work/modules.list") modules of $version"
    entry file 0644 etc/cube/modules "$work/modules.list"
}

unpack_module() { # FROM TO
    case $1 in
    *.xz) xz -dc "$1" >"$2" ;;
    *.zst) zstd -qdc "$1" >"$2" ;;
    *.gz) gzip -dc "$1" >"$2" ;;
    *) cp "$1" "$2" ;;
    esac || die "cannot unpack $1"
}

add_additions() {
    local addition from to
    for addition in ${additions[@]+"${additions[@]}"}; do
        from=${addition%:*} to=${addition##*:}
        if [[ -d $from ]]; then
            add_tree "${from%/}" "$to"
        else
            add_file "$from" "$to"
        fi
    done
}

# Directories that are only implied, the last word on each path, and an order.
complete_manifest() {
    awk -F '\t' -v OFS='\t' '
        {
            line[$1] = $0
            count = split($1, parts, "/")
            path = ""
            for (i = 1; i < count; i++) {
                path = path (i > 1 ? "/" : "") parts[i]
                if (!(path in line)) line[path] = path OFS "dir" OFS "0755" OFS ""
            }
        }
        END { for (path in line) print line[path] }
    ' "$manifest" | sort -t $'\t' -k 1,1 >"$manifest.complete"
    mv "$manifest.complete" "$manifest"
}

# --- The archive -----------------------------------------------------------------

# The "newc" format, written here because cpio(1) needs root to put a device node into an archive,
# and has no way to leave out inode numbers and times.
inode=0

record() { # MODE NAME SIZE MAJOR MINOR
    inode=$((inode + 1))
    printf '070701%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%s\0' \
        "$inode" "$1" 0 0 1 0 "$3" 0 0 "$4" "$5" $((${#2} + 1)) 0 "$2"
    pad $((110 + ${#2} + 1))
}

pad() { # LENGTH, to a multiple of four
    case $((-$1 & 3)) in
    1) printf '\0' ;;
    2) printf '\0\0' ;;
    3) printf '\0\0\0' ;;
    esac
}

write_archive() {
    local path type mode source size
    while IFS=$'\t' read -r path type mode source; do
        case $type in
        dir) record $((mode | 8#040000)) "$path" 0 0 0 ;;
        link)
            record $((mode | 8#120000)) "$path" "${#source}" 0 0
            printf '%s' "$source"
            pad "${#source}"
            ;;
        node) record $((mode | 8#020000)) "$path" 0 "${source% *}" "${source#* }" ;;
        file)
            size=$(stat -Lc %s "$source")
            record $((mode | 8#100000)) "$path" "$size" 0 0
            cat "$source"
            pad "$size"
            ;;
        esac
    done <"$manifest"
    inode=-1
    record 0 'TRAILER!!!' 0 0 0
}

# What the archive depends on: the manifest with contents for names, and this script.
content_hash() {
    local path type mode source
    {
        sha256sum <"$SCRIPT"
        while IFS=$'\t' read -r path type mode source; do
            if [[ $type == file ]]; then
                source=$(sha256sum <"$source")
            fi
            printf '%s\t%s\t%s\t%s\n' "$path" "$type" "$mode" "$source"
        done <"$manifest"
    } | sha256sum | cut -c 1-32
}

# Writes to a file of another name first: nobody ever sees half an image.
write_image() { # FILE
    local unfinished=$1.$$
    write_archive >"$unfinished" || die "cannot write $unfinished"
    mv "$unfinished" "$1"
    say "$(wc -l <"$manifest") files, $(stat -c %s "$1") bytes: $1"
}

cached_image() {
    local directory cached link
    directory=$(cache_root)/rootfs/$(content_hash)
    cached=$directory/$image
    mkdir -p "$directory"
    exec 9>"$directory/lock"
    flock 9
    [[ -s $cached ]] || write_image "$cached"
    exec 9>&-
    link=$(target_dir)/guest/$image
    mkdir -p "${link%/*}"
    ln -sfn "$cached" "$link.$$"
    mv -T "$link.$$" "$link"
    printf '%s\n' "$cached"
}

main() {
    parse_arguments "$@"
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    manifest=$work/manifest
    : >"$manifest"
    find_busybox
    add_base
    [[ -z $modules_tree ]] || add_modules
    add_additions
    complete_manifest
    if [[ -n $output ]]; then
        write_image "$output"
        realpath "$output"
    else
        cached_image
    fi
}

main "$@"
