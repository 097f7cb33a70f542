//! The control group of a VM: its VMM and the file servers are in one of their own, so that all of
//! them can be ended at once, whatever state they are in, and are counted with their pod.
//!
//! It is of the second version of control groups, also on hosts that have both. Its folder is below
//! the path that containerd gives in the spec, `linux.cgroupsPath`, else below `/cube`. Where none can
//! be made, a VM goes without one.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::place::Place;

/// Where it is if containerd names no path.
const ELSEWHERE: &str = "cube";
/// How long processes that were killed may take to be gone.
const GONE: Duration = Duration::from_secs(2);
/// Between two looks whether they are.
const LOOK: Duration = Duration::from_millis(2);

/// A control group, as it is written down before it is made, so that it is never left.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    /// Its folder.
    pub folder: PathBuf,
    /// Whether the folder around it is ours, too: it was not there before.
    pub with_parent: bool,
}

impl Group {
    /// The one for a sandbox whose first container has this spec; or why there is none.
    pub fn plan(spec: &Value, place: &Place) -> Result<Self, String> {
        let mounts = fs::read_to_string("/proc/self/mountinfo").map_err(|why| why.to_string())?;
        let root = hierarchy(&mounts).ok_or("no hierarchy of version 2 is mounted")?;
        Self::below(&root, spec["linux"]["cgroupsPath"].as_str().unwrap_or_default(), place.name())
    }

    fn below(root: &Path, path: &str, name: &OsStr) -> Result<Self, String> {
        let parent = root.join(within(path)?);
        let mut leaf = std::ffi::OsString::from("cube-");
        leaf.push(name);
        Ok(Self { with_parent: !parent.exists(), folder: parent.join(leaf) })
    }

    /// Makes it. The file given back is where a process writes 0 to be in it.
    pub fn make(&self) -> io::Result<File> {
        fs::create_dir_all(&self.folder)?;
        File::options().write(true).open(self.file("cgroup.procs"))
    }

    /// Makes sure that a process is in it.
    pub fn take_in(&self, pid: u32) -> io::Result<()> {
        fs::write(self.file("cgroup.procs"), pid.to_string())
    }

    /// Ends all that is in it, waits until that is gone, and removes it. What is not there is as good.
    pub fn end(&self) -> io::Result<()> {
        if !self.folder.exists() {
            return Ok(());
        }
        let deadline = Instant::now() + GONE;
        while !self.is_empty() {
            self.kill()?;
            if Instant::now() > deadline {
                let left = fs::read_to_string(self.file("cgroup.procs")).unwrap_or_default();
                let left = left.replace('\n', " ");
                return Err(io::Error::other(format!("processes that do not end: {left}")));
            }
            std::thread::sleep(LOOK);
        }
        remove(&self.folder)?;
        match self.folder.parent().filter(|_| self.with_parent) {
            // Another container's may be beside it.
            Some(parent) => remove(parent).or_else(|error| match error.kind() {
                io::ErrorKind::ResourceBusy | io::ErrorKind::DirectoryNotEmpty => Ok(()),
                _ => Err(error),
            }),
            None => Ok(()),
        }
    }

    /// Does so for a VMM that has ended, whose file servers may be stopped.
    pub async fn ended(&self) {
        let group = self.clone();
        if let Ok(Err(error)) = tokio::task::spawn_blocking(move || group.end()).await {
            tracing::error!(%error, folder = %self.folder.display(), "a control group is left");
        }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Whether no process is in it, one that is still on its way out included.
    fn is_empty(&self) -> bool {
        let events = fs::read_to_string(self.file("cgroup.events")).unwrap_or_default();
        !events.lines().any(|line| line == "populated 1")
    }

    /// Kills all of them at once; one by one with kernels before 5.14.
    fn kill(&self) -> io::Result<()> {
        match File::options().write(true).open(self.file("cgroup.kill")) {
            Ok(mut file) => io::Write::write_all(&mut file, b"1"),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                // Neither is there when somebody else has just removed it.
                let list = fs::read_to_string(self.file("cgroup.procs")).unwrap_or_default();
                for pid in list.lines().filter_map(|line| line.parse().ok()).filter(|pid| *pid > 0)
                {
                    let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
                }
                Ok(())
            }
            Err(error) => Err(error),
        }
    }
}

fn remove(folder: &Path) -> io::Result<()> {
    match fs::remove_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

/// Where the second version is mounted, be it beside the first.
fn hierarchy(mountinfo: &str) -> Option<PathBuf> {
    let mut fields = mountinfo.lines().map(|line| line.split_once(" - "));
    fields.find_map(|halves| {
        let (mount, source) = halves?;
        let point = mount.split(' ').nth(4)?;
        source.starts_with("cgroup2 ").then(|| PathBuf::from(point))
    })
}

/// Where in the hierarchy a `cgroupsPath` is: as a path, or `SLICE:PREFIX:NAME` for systemd.
fn within(path: &str) -> Result<PathBuf, String> {
    let path = match path.split(':').collect::<Vec<_>>()[..] {
        [slice, prefix, name] => slices(slice).join(format!("{prefix}-{name}.scope")),
        _ => PathBuf::from(path.trim_start_matches('/')),
    };
    // Of no meaning otherwise, and never may it lead out.
    if path.components().any(|part| !matches!(part, Component::Normal(_))) {
        return Err(format!("linux.cgroupsPath leads to {}", path.display()));
    }
    Ok(if path.as_os_str().is_empty() { ELSEWHERE.into() } else { path })
}

/// systemd's folders for a slice: that of `a-b.slice` is `a.slice/a-b.slice`.
fn slices(slice: &str) -> PathBuf {
    let name = slice.trim_end_matches(".slice");
    let ends = name.match_indices('-').map(|(at, _)| at).chain([name.len()]);
    ends.filter(|end| *end > 0).map(|end| format!("{}.slice", &name[..end])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_version_is_found_beside_the_first() {
        let first = "30 23 0:26 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n";
        let second = "31 23 0:27 / /sys/fs/cgroup/unified rw shared:10 - cgroup2 cgroup2 rw\n";
        assert_eq!(hierarchy(first), None);
        let found = hierarchy(&format!("{first}{second}"));
        assert_eq!(found.as_deref(), Some(Path::new("/sys/fs/cgroup/unified")));
    }

    #[test]
    fn it_is_where_containerd_has_the_pod() {
        let cases = [
            ("/default/web", "default/web"),
            ("/kubepods/burstable/pod1/2", "kubepods/burstable/pod1/2"),
            ("", "cube"),
            (
                "kubepods-besteffort-pod1.slice:cri-containerd:2",
                "kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod1.slice/\
                 cri-containerd-2.scope",
            ),
            (":cri-containerd:2", "cri-containerd-2.scope"),
        ];
        for (path, expected) in cases {
            assert_eq!(within(path).unwrap(), Path::new(expected), "{path}");
        }
    }

    #[test]
    fn no_path_leads_out_of_the_hierarchy() {
        for path in ["/../../etc", "a/../../b", "..", "x:../..:y", "../a.slice:x:y"] {
            assert!(within(path).unwrap_err().starts_with("linux.cgroupsPath"), "{path}");
        }
    }

    #[test]
    fn what_was_there_before_stays() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("given")).unwrap();
        let groups = ["given", "new/one"].map(|path| {
            let group = Group::below(root.path(), path, OsStr::new("x")).unwrap();
            fs::create_dir_all(&group.folder).unwrap();
            group
        });
        for group in &groups {
            group.end().unwrap();
            assert!(!group.folder.exists());
            group.end().unwrap();
        }
        assert!(root.path().join("given").exists() && root.path().join("new").exists());
        assert!(!root.path().join("new/one").exists());
    }
}
