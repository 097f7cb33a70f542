//! Block devices of the host: a file behind a loop device. They need root and losetup.

use std::process::Command;

use super::*;

/// A loop device, which goes with this.
struct Loop {
    path: String,
    file: NamedTempFile,
}

impl Loop {
    /// A device on a file of `sectors` sectors; `None`, told loudly, where there are none.
    fn new(sectors: u64, options: &[&str]) -> Option<Self> {
        let file = NamedTempFile::new().unwrap();
        file.as_file().write_all_at(&vec![5; (sectors * SECTOR_SIZE) as usize], 0).unwrap();
        let made = Command::new("losetup")
            .args(["--find", "--show"])
            .args(options)
            .arg(file.path())
            .output();
        match made {
            Ok(made) if made.status.success() => {
                let path = String::from_utf8(made.stdout).unwrap().trim().to_owned();
                Some(Self { path, file })
            }
            failed => {
                let why = format!("no loop device ({failed:?}): run as root with losetup");
                host::skip("loop", &why);
                None
            }
        }
    }

    fn path(&self) -> &std::path::Path {
        self.path.as_ref()
    }

    fn content(&self) -> Vec<u8> {
        let size = self.file.as_file().metadata().unwrap().len() as usize;
        let mut content = vec![0; size];
        self.file.as_file().read_exact_at(&mut content, 0).unwrap();
        content
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.path]).status();
    }
}

fn ranges(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
}

#[test]
fn a_device_is_read_written_discarded_and_zeroed() {
    for engine in host::engines() {
        let Some(device) = Loop::new(2048, &[]) else { return };
        let executor = Executor::spawn("loop").unwrap();
        let disk = host::open(engine, device.path(), false);
        assert_eq!(disk.geometry().sectors, 2048, "the size is asked of the device");
        let block = Block::new(executor.handle(), disk, config(false)).unwrap();
        let mut driver = GuestDriver::new(Box::new(block));
        driver.initialize();
        let mut send = |kind, sector, out: &[u8], room| {
            let (status, _, data) = request(&mut driver, kind, sector, out, room);
            assert_eq!(status, OK, "{engine:?}: request {kind}");
            data
        };
        assert_eq!(send(kind::IN, 2040, &[], 4096), vec![5; 4096]);
        send(kind::OUT, 8, &[7; 4096], 0);
        send(kind::WRITE_ZEROES, 0, &ranges(16, 8, 0), 0);
        send(kind::WRITE_ZEROES, 0, &ranges(24, 8, 1), 0);
        send(kind::DISCARD, 0, &ranges(512, 1024, 0), 0);
        send(kind::FLUSH, 0, &[], 0);
        assert_eq!(send(kind::IN, 8, &[], 4096), vec![7; 4096]);
        assert_eq!(send(kind::IN, 16, &[], 8192), vec![0; 8192]);
        drop(driver);
        let content = device.content();
        let at = |sector: usize, sectors: usize| &content[sector * 512..(sector + sectors) * 512];
        assert!(at(8, 8).iter().all(|byte| *byte == 7));
        assert!(at(16, 16).iter().all(|byte| *byte == 0));
        assert!(at(32, 480).iter().all(|byte| *byte == 5));
        // A loop device discards by punching a hole into its file.
        assert!(at(512, 1024).iter().all(|byte| *byte == 0));
        assert!(at(1536, 512).iter().all(|byte| *byte == 5));
    }
}

#[test]
fn a_device_of_large_blocks_says_so() {
    let Some(device) = Loop::new(64, &["--sector-size", "4096"]) else { return };
    let disk = host::open(Engine::Sync, device.path(), true);
    let geometry = disk.geometry();
    assert_eq!((geometry.logical_block, geometry.physical_block), (4096, 4096));
}

#[test]
fn a_device_is_in_one_place_at_a_time() {
    for engine in host::engines() {
        let Some(device) = Loop::new(64, &[]) else { return };
        let first = host::open(engine, device.path(), false);
        for read_only in [false, true] {
            let error = DiskFile::open(device.path(), read_only).err().unwrap().to_string();
            assert!(error.contains("in use") && error.contains(&device.path), "{error}");
        }
        // Nobody on the host can mount it meanwhile.
        let mut exclusive = std::fs::OpenOptions::new();
        std::os::unix::fs::OpenOptionsExt::custom_flags(&mut exclusive, libc::O_EXCL);
        let error = exclusive.read(true).open(device.path()).err().unwrap();
        assert_eq!(error.raw_os_error(), Some(libc::EBUSY));
        drop(first);
        let _reader = DiskFile::open(device.path(), true).unwrap();
        let _another = DiskFile::open(device.path(), true).unwrap();
    }
}

#[test]
fn a_device_that_the_host_uses_is_refused() {
    let Some(device) = Loop::new(64, &[]) else { return };
    let mut exclusive = std::fs::OpenOptions::new();
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut exclusive, libc::O_EXCL);
    let _host = exclusive.read(true).open(device.path()).unwrap();
    let error = DiskFile::open(device.path(), false).err().unwrap().to_string();
    assert!(error.contains("in use on this host") && error.contains("mounted"), "{error}");
}

#[test]
fn a_device_that_can_only_be_read_is_refused_for_writing() {
    let Some(device) = Loop::new(64, &["--read-only"]) else { return };
    assert!(matches!(DiskFile::open(device.path(), false), Err(DiskError::ReadOnly(_))));
    assert!(DiskFile::open(device.path(), true).is_ok());
}
