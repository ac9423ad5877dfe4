#!/usr/bin/env bash
# Builds the Dockerfile where there is no Docker and no registry of images, and trains two steps in each image.
#
#   bash scripts/build_image.sh              # the image for the CPU and that for CUDA
#   bash scripts/build_image.sh cpu          # one of them
#   bash scripts/build_image.sh --keep cpu   # leaves them in the folder that it names, where a later call uses the base
#
# The base is made of Debian's packages by debootstrap, and buildah runs the Dockerfile without a daemon. Both have to be
# there, and the caller has to be root; the exit status is 77 otherwise. What apt and pip are configured with on this
# machine is lent to the build (mirrors, indexes, proxies, certificates, folders of wheels) and is not in the image.
#
# TMPDIR           where the folder is made (default: /tmp). buildah copies an image three times as it keeps it: the CPU's
#                  takes 10 GB for a while, that for CUDA 50 GB; with less room the exit status is 77 as well
# SLIME_TEST_MODEL a model's folder to train, instead of SmolLM2-135M-Instruct, which is fetched in the image
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
keep=
devices=()
for word in "$@"; do
    case "$word" in
        --keep) keep=1 ;;
        cpu|cuda) devices+=("$word") ;;
        *) echo "build_image.sh: $word: give cpu, cuda or --keep" >&2; exit 2 ;;
    esac
done
if [ "${#devices[@]}" = 0 ]; then devices=(cpu cuda); fi

missing=()
if [ "$(id -u)" != 0 ]; then missing+=("the rights of root"); fi
for program in buildah debootstrap; do
    if ! command -v "$program" >/dev/null; then missing+=("$program (apt-get install $program)"); fi
done
room=10
if [ "${devices[*]}" != cpu ]; then room=50; fi
if [ "$(df --output=avail --block-size=1G "${TMPDIR:-/tmp}" | tail -n 1)" -lt "$room" ]; then
    missing+=("$room GB in ${TMPDIR:-/tmp}")
fi
if [ "${#missing[@]}" != 0 ]; then
    printf 'skipped: no image was built, because this needs %s\n' "$(printf '%s, ' "${missing[@]}" | sed 's/, $//')"
    exit 77
fi

if [ -n "$keep" ]; then
    folder="${TMPDIR:-/tmp}/slime-images"
    mkdir -p "$folder"
else
    folder="$(mktemp -d "${TMPDIR:-/tmp}/slime-images.XXXXXX")"
fi
build() { command buildah --root "$folder/storage" --runroot "$folder/run" "$@"; }
clean() {
    build rm --all >/dev/null 2>&1 || true
    if [ -n "$keep" ]; then echo "kept: buildah --root $folder/storage --runroot $folder/run images"; return; fi
    build rmi --all --force >/dev/null 2>&1 || true
    rm -rf --one-file-system "$folder"
}
trap clean EXIT

# What apt is configured with: its mirror of the base's release, and its own files.
from="$(sed -n 's/^FROM //p' Dockerfile)"
release="${from##*-}"
mirror="$(apt-get indextargets --format '$(REPO_URI)' "Codename: $release" 'Origin: Debian' | head -n 1)"
lent=()
lend() { lent+=(--volume "$1:${2:-$1}:ro"); } # PLACE [PLACE IN THE IMAGE]: readable while the image is built, not in it
for place in /etc/apt/apt.conf.d /etc/apt/apt.conf; do
    if [ -e "$place" ]; then lend "$place"; fi
done
# What pip is configured with: files and variables become one file, and what that names is lent as well.
python3 - "$folder/pip.conf" >"$folder/named" <<'EOF_PIP'
import ast, collections, pathlib, subprocess, sys, urllib.parse

listed = subprocess.run(
    [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
).stdout
sections = collections.defaultdict(dict)
for line in listed.splitlines():
    name, _, value = line.partition("=")
    section, _, key = name.rpartition(".")
    section = "global" if section == ":env:" else section
    sections[section][key] = ast.literal_eval(value)
named = set()
with open(sys.argv[1], "w") as file:
    for section, values in sections.items():
        print(f"[{section}]", *(f"{key} = {value}" for key, value in values.items()), sep="\n", file=file)
        for word in " ".join(values.values()).split():
            place = pathlib.Path(urllib.parse.unquote(word.removeprefix("file://")))
            if place.is_absolute() and place.exists():
                # An index is beside the folder of its files.
                named.add(place.parent if word.startswith("file://") and place.is_dir() else place)
print(*sorted(named), sep="\n")
EOF_PIP
lend "$folder/pip.conf" /etc/pip.conf
while read -r place; do
    if [ -n "$place" ]; then lend "$place"; fi
done <"$folder/named"

if ! build inspect "$from" >/dev/null 2>&1; then
    echo "== base: $from"
    began="$SECONDS"
    debootstrap --variant=minbase --include=python3-pip,python3-venv,python3-dev,ca-certificates,python-is-python3 \
        "$release" "$folder/base" ${mirror:+"$mirror"} >"$folder/debootstrap.log" || { tail "$folder/debootstrap.log"; exit 1; }
    # Debian forbids pip to install beside its own packages; Docker's image of Python has none.
    rm -rf "$folder"/base/usr/lib/python3*/EXTERNALLY-MANAGED "$folder"/base/var/cache/apt/archives/*.deb \
        "$folder"/base/var/lib/apt/lists/*
    container="$(build from scratch)"
    build add -q "$container" "$folder/base" / >/dev/null
    build config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
    build commit -q --rm "$container" "docker.io/library/$from" >/dev/null
    rm -rf --one-file-system "$folder/base"
    echo "   $((SECONDS - began)) s"
fi

model=()
if [ -n "${SLIME_TEST_MODEL:-}" ]; then
    lend "$(realpath "$SLIME_TEST_MODEL")" /model
    model=(--model /model)
fi
for device in "${devices[@]}"; do
    echo "== $device"
    began="$SECONDS"
    build bud --isolation chroot --network host --pull-never --layers=false "${lent[@]}" \
        --build-arg "DEVICE=$device" --tag "slime:$device" . >"$folder/$device.log" 2>&1 ||
        { tail -n 30 "$folder/$device.log"; exit 1; }
    container="$(build from --pull-never "slime:$device")"
    root="$(build mount "$container")"
    echo "   built in $((SECONDS - began)) s, $(du -sm --one-file-system "$root" | cut -f 1) MB"
    began="$SECONDS"
    build run --isolation chroot --network host "${lent[@]}" "$container" \
        python scripts/quickstart/run.py --num-rollout 2 "${model[@]}" 2>&1 | tee "$folder/$device-run.log" |
        grep -E '^quickstart: held-out|rror' || { tail -n 30 "$folder/$device-run.log"; exit 1; }
    echo "   trained in $((SECONDS - began)) s"
    build rm "$container" >/dev/null
done
