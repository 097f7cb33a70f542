//! Kernels, initrds, root images and disks.

use crate::{run, with_kernel};
use harness::{Place, image};

#[test]
fn no_kernel() {
    let place = Place::new();
    let ended = with_kernel(&place, "/no/kernel", &[]).end();
    ended.assert_refused(&["kernel /no/kernel", "No such file", "correct the path"]);
}

#[test]
fn a_kernel_that_is_a_folder() {
    let place = Place::new();
    let folder = place.given_folder("boot");
    let ended = with_kernel(&place, &folder, &[]).end();
    ended.assert_refused(&[&folder, "not a regular file", "name the image itself"]);
}

#[test]
fn a_kernel_that_is_a_device_without_an_end() {
    let place = Place::new();
    let ended = with_kernel(&place, "/dev/zero", &[]).end();
    ended.assert_refused(&["/dev/zero", "not a regular file", "name the image itself"]);
}

/// A pipe that nobody writes to.
fn pipe(place: &Place) -> String {
    let pipe = harness::artifacts::text(&place.given_path("pipe"));
    image::host("mkfifo", &[&pipe]);
    pipe
}

#[test]
fn a_kernel_that_is_a_pipe_nobody_writes_to() {
    let place = Place::new();
    let pipe = pipe(&place);
    let ended = with_kernel(&place, &pipe, &[]).end();
    ended.assert_refused(&[&pipe, "not a regular file", "name the image itself"]);
}

/// A file that is no kernel at all.
#[track_caller]
fn assert_no_kernel(content: &[u8]) {
    let place = Place::new();
    let kernel = place.given("vmlinux", content);
    let ended = with_kernel(&place, &kernel, &[]).end();
    ended.assert_refused(&[&kernel, "neither", "ELF vmlinux nor a bzImage", "name one"]);
}

#[test]
fn a_kernel_that_is_empty() {
    assert_no_kernel(b"");
}

#[test]
fn a_kernel_that_is_a_picture() {
    assert_no_kernel(&image::picture());
}

#[test]
fn a_kernel_that_is_noise() {
    assert_no_kernel(&image::noise(1 << 20, 7));
}

#[test]
fn a_kernel_for_32_bits() {
    let mut kernel = image::idle_kernel();
    kernel[4] = 1;
    assert_no_kernel(&kernel);
}

#[test]
fn a_kernel_for_another_processor() {
    let mut kernel = image::idle_kernel();
    // AArch64.
    kernel[18] = 183;
    assert_no_kernel(&kernel);
}

/// A kernel of which only the first `len` bytes are left.
#[track_caller]
fn assert_truncated(kernel: &[u8], len: usize) {
    let place = Place::new();
    let file = place.given("vmlinux", &kernel[..len]);
    let ended = with_kernel(&place, &file, &[]).end();
    ended.assert_refused(&[&file, "cut off", &format!("{len} bytes"), "copy or build it again"]);
}

#[test]
fn a_kernel_that_is_cut_off_in_its_header() {
    assert_truncated(&image::idle_kernel(), 30);
}

#[test]
fn a_kernel_that_is_cut_off_in_its_program_headers() {
    assert_truncated(&image::idle_kernel(), 100);
}

#[test]
fn a_kernel_that_is_cut_off_in_its_code() {
    assert_truncated(&image::kernel(&[0x90; 4096]), 2000);
}

#[test]
fn a_bzimage_that_is_cut_off() {
    // One sector of set-up and a megabyte in units of 16 bytes, protocol 2.15, 64-bit entry.
    let mut kernel = vec![0; 4096];
    kernel[0x1f1] = 1;
    kernel[0x1f4..0x1f8].copy_from_slice(&0x1_0000_u32.to_le_bytes());
    kernel[0x202..0x206].copy_from_slice(b"HdrS");
    kernel[0x206..0x208].copy_from_slice(&0x20f_u16.to_le_bytes());
    kernel[0x236] = 1;
    assert_truncated(&kernel, 4096);
}

#[test]
fn a_kernel_that_is_a_program() {
    let place = Place::new();
    // Position-independent, as programs are.
    let program = harness::artifacts::text(&std::env::current_exe().unwrap());
    let ended = with_kernel(&place, &program, &[]).end();
    ended.assert_refused(&[&program, "first megabyte", "Linux kernel"]);
}

#[test]
fn a_kernel_without_the_entry_that_is_asked_for() {
    let place = Place::new();
    let ended = run(&place, &["--boot-protocol", "pvh"]).end();
    ended.assert_refused(&["no PVH entry", "use --boot-protocol auto"]);
}

#[test]
fn a_kernel_that_may_not_be_read() {
    let place = Place::new();
    let ended = with_kernel(&place, "/etc/shadow", &[]).as_nobody().end();
    ended.assert_refused(&["kernel /etc/shadow", "Permission denied", "its mode"]);
}

#[test]
fn the_kernel_that_was_never_built() {
    let place = Place::new();
    let call = place.call(["run", "--", "true"]).from_copy().without_env("CUBE_KERNEL");
    let ended = call.end();
    ended.assert_refused(&["no kernel", "guest-kernel/build.sh", "--kernel"]);
}

/// An initrd at `path`.
#[track_caller]
fn assert_initrd_refused(place: &Place, path: &str, words: &[&str]) {
    let kernel = place.given("kernel", image::idle_kernel());
    let call = place.call(["run", "--kernel", &kernel, "--initrd", path, "--", "true"]);
    let ended = call.end();
    ended.assert_refused(&["initrd", path]);
    ended.assert_refused(words);
}

#[test]
fn no_initrd() {
    assert_initrd_refused(&Place::new(), "/no/initrd", &["No such file", "correct the path"]);
}

#[test]
fn an_initrd_that_is_empty() {
    let place = Place::new();
    let empty = place.given("initrd", "");
    assert_initrd_refused(&place, &empty, &["empty", "build it again"]);
}

#[test]
fn an_initrd_that_is_a_folder() {
    let place = Place::new();
    let folder = place.given_folder("initrd");
    assert_initrd_refused(&place, &folder, &["not a regular file", "name the image itself"]);
}

#[test]
fn an_initrd_that_does_not_fit_into_memory() {
    let place = Place::new();
    let initrd = place.given("initrd", vec![0; 33 << 20]);
    let kernel = place.given("kernel", image::idle_kernel());
    let call = place.call(["run", "--memory", "32M", "--kernel", &kernel, "--initrd", &initrd]);
    let ended = call.arguments(["--", "true"]).end();
    ended.assert_refused(&[&initrd, "use a larger --memory"]);
}

#[test]
fn no_rootfs() {
    let place = Place::new();
    let ended = run(&place, &["--rootfs", "/no/image"]).end();
    ended.assert_refused(&["/no/image", "does not exist", "correct the path"]);
}

#[test]
fn a_rootfs_that_is_too_small() {
    let place = Place::new();
    let image = place.given("root.img", "tiny");
    let ended = run(&place, &["--rootfs", &image]).end();
    ended.assert_refused(&[&image, "4 bytes", "less than one sector", "enlarge it"]);
}

#[test]
fn a_rootfs_that_is_a_folder() {
    let place = Place::new();
    let folder = place.given_folder("root");
    let ended = run(&place, &["--rootfs", &folder]).end();
    ended.assert_refused(&[&folder, "is a directory", "name a raw image file"]);
}

/// A disk, in the words of `--disk`.
#[track_caller]
fn assert_disk_refused(place: &Place, disk: &str, words: &[&str]) {
    run(place, &["--disk", disk]).end().assert_refused(words);
}

#[test]
fn no_disk() {
    let words = ["/no/disk", "does not exist", "correct the path"];
    assert_disk_refused(&Place::new(), "path=/no/disk", &words);
}

#[test]
fn a_disk_that_is_a_folder() {
    let place = Place::new();
    let folder = place.given_folder("disk");
    let words = [&folder, "is a directory", "name a raw image file"];
    assert_disk_refused(&place, &format!("path={folder}"), &words);
}

#[test]
fn a_disk_that_is_another_kind_of_device() {
    let words = ["/dev/zero", "neither a file nor a block device", "name one"];
    assert_disk_refused(&Place::new(), "path=/dev/zero", &words);
}

#[test]
fn a_disk_that_is_a_pipe_nobody_writes_to() {
    let place = Place::new();
    let pipe = pipe(&place);
    let words = [pipe.as_str(), "neither a file nor a block device", "name one"];
    assert_disk_refused(&place, &format!("path={pipe},ro"), &words);
}

#[test]
fn a_disk_with_half_a_sector() {
    let place = Place::new();
    let disk = place.given("disk", [0; 700]);
    let words = [&disk, "700 bytes", "not a multiple of 512", "pad it"];
    assert_disk_refused(&place, &format!("path={disk}"), &words);
}

#[test]
fn a_disk_that_may_only_be_read() {
    let place = Place::new();
    let disk = place.given("disk", [0; 4096]);
    image::host("chmod", &["444", &disk]);
    let ended = run(&place, &["--disk", &format!("path={disk}")]).as_nobody().end();
    ended.assert_refused(&[&disk, "may not be opened for writing", "change its mode"]);
}

#[test]
fn a_disk_on_a_file_system_that_may_only_be_read() {
    let place = Place::new();
    let disk = place.given("disk", [0; 4096]);
    let ended = run(&place, &["--disk", &format!("path={disk}")]).with_read_only(&disk).end();
    ended.assert_refused(&[&disk, "read-only"]);
}

#[test]
fn one_disk_twice() {
    let place = Place::new();
    let disk = format!("path={}", place.given("disk", [0; 4096]));
    let ended = run(&place, &["--disk", &disk, "--disk", &disk]).end();
    ended.assert_refused(&[&place.given("disk", [0; 4096]), "in use", "its own copy"]);
}

#[test]
fn two_disks_of_one_name() {
    let place = Place::new();
    let disks = ["one", "two"].map(|name| format!("path={},id=a", place.given(name, [0; 512])));
    let ended = run(&place, &["--disk", &disks[0], "--disk", &disks[1]]).end();
    ended.assert_refused(&["\"a\"", "its own id="]);
}

#[test]
fn more_disks_than_fit() {
    let place = Place::new();
    let disk = format!("path={},ro", place.given("disk", [0; 512]));
    let disks: Vec<&str> = (0..20).flat_map(|_| ["--disk", &disk]).collect();
    run(&place, &disks).end().assert_refused(&["virtio devices do not fit", "a VM takes 18"]);
}

#[test]
fn disk_options_with_values_that_cannot_be() {
    let place = Place::new();
    let disk = place.given("disk", [0; 4096]);
    for (option, words) in [
        ("engine=aio", ["\"aio\"", "use auto, io_uring or sync"]),
        ("queues=17", ["queues=\"17\"", "1 to 16"]),
        ("rate_bytes=10M", ["\"10M\"", "write for example 10M/s"]),
        ("rate_ops=1/2h", ["\"1/2h\"", "write for example"]),
        ("ro,ro", ["\"ro\" is given twice", "leave one out"]),
    ] {
        assert_disk_refused(&place, &format!("path={disk},{option}"), &words);
    }
}

#[test]
fn a_disk_whose_name_a_terminal_would_obey() {
    let place = Place::new();
    let ended = run(&place, &["--disk", "path=no\u{1b}[2J\r\n"]).end();
    ended.assert_refused(&["no\\u{1b}[2J"]);
    assert!(!ended.stderr.trim_end().contains(char::is_control), "{ended:?}");
}

#[test]
fn a_disk_with_an_unknown_option() {
    let words = ["\"rw=1\"", "use path=FILE[,id=NAME][,ro]"];
    assert_disk_refused(&Place::new(), "path=disk,rw=1", &words);
}

#[test]
fn a_disk_with_two_paths() {
    let words = ["\"path=b\"", "given twice", "leave one out"];
    assert_disk_refused(&Place::new(), "path=a,path=b", &words);
}

#[test]
fn a_disk_without_a_path() {
    let words = ["\"ro\"", "no path", "use path=FILE[,id=NAME][,ro]"];
    assert_disk_refused(&Place::new(), "ro", &words);
}

#[test]
fn a_disk_whose_name_the_guest_could_not_show() {
    assert_disk_refused(&Place::new(), "path=disk,id=a/b", &["\"a/b\"", "letters, digits"]);
}

#[test]
fn persistent_memory_that_does_not_exist() {
    let place = Place::new();
    let ended = run(&place, &["--pmem", "path=/no/file"]).end();
    ended.assert_refused(&["/no/file", "does not exist", "correct the path"]);
}

#[test]
fn persistent_memory_that_is_a_folder() {
    let place = Place::new();
    let folder = place.given_folder("pmem");
    let ended = run(&place, &["--pmem", &format!("path={folder}")]).end();
    ended.assert_refused(&[&folder, "neither a regular file", "give one"]);
}

#[test]
fn persistent_memory_that_is_empty() {
    let place = Place::new();
    let empty = place.given("pmem", "");
    let ended = run(&place, &["--pmem", &format!("path={empty}")]).end();
    ended.assert_refused(&[&empty, "is empty", "enlarge it"]);
}

#[test]
fn persistent_memory_that_is_a_pipe_nobody_writes_to() {
    let place = Place::new();
    let pipe = pipe(&place);
    let ended = run(&place, &["--pmem", &format!("path={pipe},ro")]).end();
    ended.assert_refused(&[&pipe, "neither a regular file", "give one"]);
}

#[test]
fn no_damaged_header_makes_it_panic() {
    use hypervisor::boot::kernel::KernelFile;
    use hypervisor::config::BootProtocol;
    let place = Place::new();
    let memory = hypervisor::memory::fresh(64 << 20).unwrap();
    let good = image::idle_kernel();
    let mut refused = 0;
    for (round, damage) in (1..1000).zip(image::noise(1 << 20, 5).chunks(16)) {
        let mut kernel = good.clone();
        // Up to four bytes of the two headers, by a value, an extreme, or a bit.
        for [at, how, value, _] in damage.as_chunks().0.iter().take(1 + round % 4) {
            let byte = &mut kernel[usize::from(*at) % 120];
            *byte = [*value, 0, 0xff, *byte ^ (1 << (value % 8))][usize::from(how % 4)];
        }
        let path = place.given("vmlinux", &kernel);
        let opened = KernelFile::open(path.as_ref());
        let loaded = opened.and_then(|file| file.load(&memory, BootProtocol::Auto));
        refused += u32::from(loaded.is_err());
    }
    assert!(refused > 300, "only {refused} damaged kernels were refused");
}
