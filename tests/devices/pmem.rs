//! A file as the guest's memory: its root, shared with other guests, or a copy of its own.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use harness::census::file_mapping;
use harness::{Place, TestVm, image, sh};
use libtest_mimic::Trial;

pub fn trials() -> Vec<Trial> {
    harness::trials![
        a_root_in_persistent_memory_needs_no_page_cache_over_mmio,
        a_root_in_persistent_memory_needs_no_page_cache_over_pci,
        what_the_host_writes_is_in_the_memory_of_the_guest,
        two_guests_share_the_pages_of_one_file,
        a_file_system_that_is_written_is_a_copy,
    ]
}

const MIB: u64 = 1 << 20;
/// Of the file in the images, which is most of them.
const LARGE: usize = 24 << 20;

/// An image of a small root with a large file in it.
fn root(place: &Place) -> String {
    let tree = image::tree(place, "the image\n");
    fs::write(Path::new(&tree).join("large"), image::noise(LARGE, 67)).unwrap();
    image::erofs(place, &tree)
}

/// A guest whose root is this image.
fn guest(place: Place, image: &str, transport: &str) -> TestVm {
    TestVm::builder_in(place)
        .transport(transport)
        .option("--pmem", format!("path={image},ro"))
        .option("--cmdline-append", "cube.root=/dev/pmem0 cube.rootflags=dax")
        .boot()
}

/// Has the guest read the large file, and gives how many bytes its page cache has grown by.
fn read_large(vm: &TestVm) -> u64 {
    // The root has few applets, and a shell that counts.
    let line = "cached() { while read name kib unit; do [ $name = Cached: ] && echo $kib; done \
                </proc/meminfo; }; before=$(cached); busybox cmp /large /large; \
                echo $((($(cached) - before) * 1024))";
    let grown = vm.exec(sh(line)).text();
    grown.parse::<i64>().unwrap().max(0).cast_unsigned()
}

fn assert_root(transport: &str) {
    let place = Place::new();
    let image = root(&place);
    let vm = guest(place, &image, transport);
    assert_eq!(vm.exec(["cat", "/etc/image"]).text(), "the image");
    let sum = vm.exec(["busybox", "sha256sum", "/large"]).text();
    let copy = vm.place().given("sum", sum.replace("/large", "-"));
    let line = format!("busybox sha256sum -c {copy}");
    // The host sums up what the image was made of.
    let large = vm.place().given_path("tree/large");
    image::host("sh", &["-c", &format!("{line} <'{}'", large.display())]);
    let cached = read_large(&vm);
    assert!(cached < LARGE as u64 / 4, "the guest has cached {} MiB", cached / MIB);
}

fn a_root_in_persistent_memory_needs_no_page_cache_over_mmio() {
    assert_root("mmio");
}

fn a_root_in_persistent_memory_needs_no_page_cache_over_pci() {
    assert_root("pci");
}

fn what_the_host_writes_is_in_the_memory_of_the_guest() {
    let builder = TestVm::builder();
    let file = builder.place().given("file", vec![b'a'; 4096]);
    let vm = builder.option("--pmem", format!("path={file},ro")).boot();
    let read =
        || vm.exec(sh("dd if=/dev/pmem0 bs=4096 count=1 iflag=direct 2>/dev/null | head -c 4"));
    assert_eq!(read().text(), "aaaa");
    fs::File::options().write(true).open(&file).unwrap().write_all_at(b"new ", 0).unwrap();
    assert_eq!(read().stdout, b"new ");
}

fn two_guests_share_the_pages_of_one_file() {
    let place = Place::new();
    let image = root(&place);
    let [one, other] = [place, Place::new()].map(|place| guest(place, &image, "mmio"));
    for vm in [&one, &other] {
        vm.exec(["busybox", "cmp", "/large", "/large"]).text();
    }
    for vm in [&one, &other] {
        let mapping = file_mapping(vm.pid(), &image);
        assert!(mapping.resident >= LARGE as u64, "{mapping:?}");
        // All of it in two processes.
        assert!(mapping.proportional <= mapping.resident * 6 / 10, "{mapping:?}");
        assert_eq!(mapping.private_dirty, 0, "{mapping:?}");
    }
}

fn a_file_system_that_is_written_is_a_copy() {
    let place = Place::new();
    let tree = image::tree(&place, "the image\n");
    let file = image::ext4(&place, &tree);
    let before = fs::read(&file).unwrap();
    let vm = TestVm::builder_in(place).option("--pmem", format!("path={file}")).boot();
    let line = "mount -o dax /dev/pmem0 /mnt && grep -c '/mnt ext4 .*dax' /proc/mounts && \
                head -c 3000000 /dev/urandom >/tmp/new && cp /tmp/new /mnt/new && sync && \
                echo changed >/mnt/etc/image && umount /mnt && mount -o dax /dev/pmem0 /mnt && \
                cmp /tmp/new /mnt/new && cat /mnt/etc/image";
    assert_eq!(vm.exec(sh(line)).text(), "1\nchanged");
    assert!(fs::read(&file).unwrap() == before, "the file has changed");
}
