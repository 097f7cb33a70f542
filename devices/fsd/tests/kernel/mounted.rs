//! A share in this host's kernel.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use cube_fsd::restore::Report;
use cube_fsd::share::{Policy, Settings};
use tempfile::TempDir;

use crate::guest::Answers;
use crate::local::Local;

/// Longest message, and most room for an answer: a mebibyte and what comes before it.
const MESSAGE: usize = (1 << 20) + 8192;

/// What is between the kernel and the file system.
struct Serving {
    /// `None` between two servers: then the kernel waits.
    server: Option<Local>,
    settings: Settings,
    /// How often each opcode was asked.
    asked: BTreeMap<u32, usize>,
}

/// A directory, and where it is mounted.
pub struct Mounted {
    place: TempDir,
    serving: Arc<Mutex<Serving>>,
    thread: Option<JoinHandle<()>>,
}

impl Mounted {
    pub fn new(settings: Settings) -> Self {
        let place = tempfile::tempdir().unwrap();
        let share = place.path().join("share");
        for name in ["share", "other", "mount"] {
            fs::create_dir(place.path().join(name)).unwrap();
        }
        let server = Some(Local::new(&share, settings, Policy::Tolerant));
        let serving = Serving { server, settings, asked: BTreeMap::new() };
        let serving = Arc::new(Mutex::new(serving));
        let fuse = OpenOptions::new().read(true).write(true).open("/dev/fuse").unwrap();
        // As virtio-fs mounts: the kernel checks permissions, for all users.
        let options = format!(
            "fd={},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions",
            fuse.as_raw_fd()
        );
        mount(&place.path().join("mount"), &options);
        let served = serving.clone();
        let thread = std::thread::spawn(move || serve(fuse, &served));
        Self { place, serving, thread: Some(thread) }
    }

    /// The directory on the host.
    pub fn share(&self) -> PathBuf {
        self.place.path().join("share")
    }

    /// Another directory.
    pub fn other(&self) -> PathBuf {
        self.place.path().join("other")
    }

    /// Something in the mount.
    pub fn at(&self, path: &str) -> PathBuf {
        self.place.path().join("mount").join(path)
    }

    /// Saves, ends the server, does `meanwhile`, and restores with another one on `directory`.
    pub fn restored_on(
        &self,
        directory: &Path,
        policy: Policy,
        meanwhile: impl FnOnce(),
    ) -> Report {
        let mut serving = self.serving.lock().unwrap();
        let state = serving.server.take().unwrap().save();
        meanwhile();
        let mut server = Local::new(directory, serving.settings, policy);
        let report = server.load(&state).unwrap().unwrap();
        serving.server = Some(server);
        report
    }

    /// The same on the same directory.
    pub fn restored(&self, meanwhile: impl FnOnce()) -> Report {
        self.restored_on(&self.share(), Policy::Tolerant, meanwhile)
    }

    /// How often the kernel has asked for that.
    pub fn asked(&self, opcode: u32) -> usize {
        self.serving.lock().unwrap().asked.get(&opcode).copied().unwrap_or(0)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let mount = self.place.path().join("mount");
        let mount = CString::new(mount.as_os_str().as_bytes()).unwrap();
        // SAFETY: a string with its end.
        unsafe { libc::umount2(mount.as_ptr(), libc::MNT_DETACH) };
        if let Some(thread) = self.thread.take() {
            // It has told before if it has failed.
            let _ = thread.join();
        }
    }
}

fn mount(at: &Path, options: &str) {
    let at = CString::new(at.as_os_str().as_bytes()).unwrap();
    let options = CString::new(options).unwrap();
    let (source, kind) = (c"share".as_ptr(), c"fuse".as_ptr());
    // SAFETY: strings with their ends.
    let done = unsafe { libc::mount(source, at.as_ptr(), kind, 0, options.as_ptr().cast()) };
    assert_eq!(done, 0, "mount: {}", std::io::Error::last_os_error());
}

/// Until it is unmounted.
fn serve(mut fuse: File, serving: &Mutex<Serving>) {
    let mut message = vec![0; MESSAGE];
    loop {
        let len = match fuse.read(&mut message) {
            Ok(len) => len,
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => return,
            // A message that was taken back.
            Err(_) => continue,
        };
        let request = &message[..len];
        let opcode = u32::from_le_bytes(request[4..8].try_into().unwrap());
        let mut serving = serving.lock().unwrap();
        *serving.asked.entry(opcode).or_default() += 1;
        let answer = serving.server.as_mut().unwrap().ask(request, room(opcode, request));
        if !answer.is_empty() {
            // Fails for one that nobody waits for any more.
            let _ = fuse.write(&answer);
        }
    }
}

/// How much there is for the answer: as a guest's driver has it, what a read asks for, and no more.
fn room(opcode: u32, request: &[u8]) -> usize {
    const READ: u32 = 15;
    const SIZE: std::ops::Range<usize> = 56..60;
    match (opcode, request.get(SIZE)) {
        (READ, Some(size)) => 16 + u32::from_le_bytes(size.try_into().unwrap()) as usize,
        _ => MESSAGE,
    }
}
