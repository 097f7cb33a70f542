//! A folder for one test, and the promise that nothing is left in it or alive from it.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::artifacts::text;
use crate::call::Call;
use crate::census;

/// The variable that every process started from a place has in its environment.
pub const MARK: &str = "CUBE_TEST_PLACE";

/// A user with no rights at all: nobody.
pub const NOBODY: u32 = 65534;

/// Seconds until a guest that does not get ready counts as failed.
pub const BOOT_TIMEOUT: &str = "300";

/// How long what was killed may take to go.
const SETTLES: Duration = Duration::from_secs(10);

/// A folder with two sides: what the test gives ([`Place::given`]), and the working and temporary
/// folder of what it calls. Dropping it removes both, after having looked at the second: it must
/// be empty, and no process that was started from here may live.
pub struct Place {
    root: TempDir,
}

impl Default for Place {
    fn default() -> Self {
        Self::new()
    }
}

impl Place {
    /// A new one.
    pub fn new() -> Self {
        // Short, since paths of sockets must be.
        let root = tempfile::Builder::new().prefix("cube-test-").tempdir().unwrap();
        for folder in ["given", "work"] {
            fs::create_dir(root.path().join(folder)).unwrap();
        }
        // For calls as another user.
        fs::set_permissions(root.path(), fs::Permissions::from_mode(0o755)).unwrap();
        Self { root }
    }

    /// Its root, which is also the value of [`MARK`].
    pub fn root(&self) -> &Path {
        self.root.path()
    }

    /// Makes a file for `cube-vmm` to read, and gives its path.
    pub fn given(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        let path = self.root().join("given").join(name);
        fs::write(&path, content).unwrap();
        text(&path)
    }

    /// The path of something given, whether it exists or not.
    pub fn given_path(&self, name: &str) -> PathBuf {
        self.root().join("given").join(name)
    }

    /// Makes a folder for `cube-vmm` to stumble over.
    pub fn given_folder(&self, name: &str) -> String {
        let path = self.given_path(name);
        fs::create_dir(&path).unwrap();
        text(&path)
    }

    /// The path of something that `cube-vmm` makes, and is to remove.
    pub fn path(&self, name: &str) -> String {
        text(&self.work().join(name))
    }

    /// The working folder of calls.
    pub fn work(&self) -> PathBuf {
        self.root().join("work")
    }

    /// Reads and removes a file that `cube-vmm` is meant to leave.
    #[track_caller]
    pub fn take(&self, name: &str) -> Vec<u8> {
        let path = self.work().join(name);
        let content = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        fs::remove_file(&path).unwrap();
        content
    }

    /// Gives the working folder to [`NOBODY`].
    pub fn open_to_nobody(&self) {
        chown(self.work(), Some(NOBODY), Some(NOBODY)).unwrap();
    }

    /// A call of `cube-vmm` from here.
    pub fn call<A: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = A>) -> Call<'_> {
        Call::new(self).arguments(arguments)
    }

    /// A call of `cube-vmm run` with these options, for a command in the guest. The guest may take
    /// long to boot, since the machine may be an emulated one that is busy otherwise.
    pub fn run<W: AsRef<OsStr>>(
        &self,
        options: &[&str],
        command: impl IntoIterator<Item = W>,
    ) -> Call<'_> {
        let call = self.call(["run", "--boot-timeout", BOOT_TIMEOUT]).arguments(options);
        call.arguments(["--"]).arguments(command)
    }

    /// What is left: processes and files, in words.
    pub fn leftovers(&self) -> Vec<String> {
        let mut left = census::marked(self.root());
        let files = fs::read_dir(self.work()).unwrap();
        left.extend(files.map(|file| format!("file {}", file.unwrap().path().display())));
        left
    }

    /// Waits until nothing is left.
    ///
    /// # Panics
    /// If something stays.
    #[track_caller]
    pub fn assert_clean(&self) {
        let deadline = Instant::now() + SETTLES;
        loop {
            let left = self.leftovers();
            if left.is_empty() {
                return;
            }
            assert!(Instant::now() < deadline, "left behind: {left:#?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.assert_clean();
        }
    }
}
