//! Disks and root images.

use std::fs;

use harness::{Place, image, sh};
use libtest_mimic::Trial;

const MIB: usize = 1 << 20;

pub fn trials() -> Vec<Trial> {
    harness::trials![
        what_the_guest_writes_is_in_the_file,
        a_file_system_made_in_the_guest_is_whole,
        what_is_in_the_file_is_what_the_guest_reads,
        both_engines_keep_every_byte_of_two_processors_on_both_transports,
        a_read_only_disk_stays_as_it_is,
        a_read_only_disk_may_be_shared,
        disks_have_their_names_and_sizes_in_order,
        an_ext4_image_becomes_the_root,
        an_erofs_image_becomes_the_root,
        a_root_image_leaves_the_first_name_to_itself,
        an_image_without_a_file_system_is_told,
        persistent_memory_is_the_file_and_does_not_change_it,
    ]
}

fn what_the_guest_writes_is_in_the_file() {
    let place = Place::new();
    let disk = place.given("disk", vec![0; 4 * MIB]);
    let line = "printf written | dd of=/dev/vda bs=512 seek=1000 conv=notrunc 2>/dev/null";
    let call = place.run(&["--disk", &format!("path={disk}")], sh(line));
    call.end().output(0);
    let mut expected = vec![0; 4 * MIB];
    expected[512_000..512_007].copy_from_slice(b"written");
    assert!(fs::read(disk).unwrap() == expected, "the file is not what was written");
}

fn a_file_system_made_in_the_guest_is_whole() {
    let place = Place::new();
    let disk = place.given("disk", vec![0; 16 * MIB]);
    image::host("mkfs.ext4", &["-q", &disk]);
    let line = "mount /dev/vda /mnt && head -c 3000000 /dev/urandom >/mnt/file && \
                sha256sum </mnt/file";
    let call = place.run(&["--disk", &format!("path={disk}")], sh(line));
    let sum = call.end().output(0);
    image::host("e2fsck", &["-fn", &disk]);
    let copy = harness::artifacts::text(&place.given_path("copy"));
    image::host("debugfs", &["-R", &format!("dump /file {copy}"), &disk]);
    let check = place.given("sum", sum.replace('-', &copy));
    image::host("sha256sum", &["--check", "--status", &check]);
}

fn what_is_in_the_file_is_what_the_guest_reads() {
    let place = Place::new();
    let content = image::noise(8 * MIB, 23);
    let disk = place.given("disk", &content);
    let call = place.run(&["--disk", &format!("path={disk},ro")], ["cat", "/dev/vda"]);
    let ended = call.end();
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    assert!(ended.stdout == content, "the bytes differ");
}

fn both_engines_keep_every_byte_of_two_processors_on_both_transports() {
    let content = image::noise(8 * MIB, 29);
    // Four copy a quarter each, at the same time, and read past the guest's cache meanwhile.
    let line = "for i in 0 1 2 3; do \
                dd if=/dev/vda of=/dev/vdb bs=64k count=32 skip=$((i*32)) seek=$((i*32)) \
                conv=notrunc,fsync 2>/dev/null & \
                dd if=/dev/vda of=/dev/null bs=4k iflag=direct count=100 skip=$((i*400)) \
                2>/dev/null & done; wait; ls /sys/block/vdb/mq | wc -l";
    for transport in ["mmio", "pci"] {
        for engine in ["auto", "sync"] {
            let place = Place::new();
            let from = format!("path={},ro,engine={engine}", place.given("from", &content));
            let copy = place.given("copy", vec![0; content.len()]);
            let to = format!("path={copy},engine={engine}");
            let options = ["--cpus", "2", "--transport", transport, "--disk", &from, "--disk", &to];
            assert_eq!(place.run(&options, sh(line)).end().output(0).trim(), "2");
            assert!(fs::read(copy).unwrap() == content, "{transport}, {engine}: the copy differs");
        }
    }
}

fn a_read_only_disk_stays_as_it_is() {
    let place = Place::new();
    let content = image::noise(MIB, 29);
    let disk = place.given("disk", &content);
    let line = "cat /sys/block/vda/ro; dd if=/dev/zero of=/dev/vda bs=4096 count=1 conv=fsync";
    let call = place.run(&["--disk", &format!("path={disk},ro")], sh(line));
    let ended = call.end();
    assert_eq!(ended.output(1), "1\n");
    assert!(fs::read(disk).unwrap() == content, "the file has changed");
}

fn a_read_only_disk_may_be_shared() {
    let place = Place::new();
    let disk = format!("path={},ro", place.given("disk", vec![0; MIB]));
    let holder = place.run(&["--disk", &disk], sh("echo ready; cat")).open_stdin();
    let holder = holder.start();
    holder.stdout.wait_for("ready");
    let call = place.run(&["--disk", &disk], ["wc", "-c", "/dev/vda"]);
    assert_eq!(call.end().output(0), format!("{MIB} /dev/vda\n"));
    holder.end().output(0);
}

fn disks_have_their_names_and_sizes_in_order() {
    let place = Place::new();
    let first = format!("path={},id=first-one", place.given("a", vec![0; MIB]));
    let second = format!("path={},ro", place.given("b", vec![0; 2 * MIB]));
    let line = "for d in vda vdb; do cat /sys/block/$d/serial; echo; cat /sys/block/$d/size; done";
    let call = place.run(&["--disk", &first, "--disk", &second], sh(line));
    let text = call.end().output(0);
    let words: Vec<&str> = text.split_whitespace().collect();
    assert_eq!(words, ["first-one", "2048", "disk1", "4096"]);
}

/// The image is `/`, can be written, and is on the host afterwards what it was before.
fn assert_root(place: &Place, image: &str, file_system: &str) {
    let before = fs::read(image).unwrap();
    let line = "cat /etc/image; echo changed >/etc/image; cat /etc/image; rm /bin/ls; \
                grep ' / ' /proc/mounts; grep /dev/vda /proc/mounts || true";
    let call = place.run(&["--rootfs", image], sh(line));
    let text = call.end().output(0);
    assert!(text.starts_with("the image\nchanged\n"), "{text}");
    assert!(text.contains("overlay") || text.contains(file_system), "{text}");
    assert!(fs::read(image).unwrap() == before, "the image has changed");
}

fn an_ext4_image_becomes_the_root() {
    let place = Place::new();
    let tree = image::tree(&place, "the image\n");
    assert_root(&place, &image::ext4(&place, &tree), "ext4");
}

fn an_erofs_image_becomes_the_root() {
    let place = Place::new();
    let tree = image::tree(&place, "the image\n");
    assert_root(&place, &image::erofs(&place, &tree), "erofs");
}

fn a_root_image_leaves_the_first_name_to_itself() {
    let place = Place::new();
    let root = image::erofs(&place, &image::tree(&place, "the image\n"));
    let disk = place.given("disk", vec![0; MIB]);
    let call = place.run(
        &["--rootfs", &root, "--disk", &format!("path={disk}")],
        sh("echo written >/dev/vdb; cat /etc/image"),
    );
    let ended = call.end();
    assert_eq!(ended.output(0), "the image\n");
    assert!(fs::read(disk).unwrap().starts_with(b"written\n"));
}

fn an_image_without_a_file_system_is_told() {
    let place = Place::new();
    let noise = place.given("root", image::noise(MIB, 31));
    let ended = place.run(&["--rootfs", &noise], ["true"]).end();
    assert!((110..=117).contains(&ended.code), "{ended:?}");
    assert!(ended.stderr.contains("/dev/vda"), "{ended:?}");
}

fn persistent_memory_is_the_file_and_does_not_change_it() {
    let place = Place::new();
    let content = image::noise(4 * MIB, 61);
    let file = place.given("pmem", &content);
    let line = "head -c 16 /dev/pmem0; echo changed | dd of=/dev/pmem0 conv=fsync 2>/dev/null; \
                head -c 8 /dev/pmem0";
    let ended = place.run(&["--pmem", &format!("path={file}")], sh(line)).end();
    ended.output(0);
    assert_eq!(ended.stdout, [&content[..16], b"changed\n"].concat());
    assert!(fs::read(file).unwrap() == content, "the file has changed");
}
