//! `/etc/cube/config.toml`: what an operator may say about all sandboxes of this host.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::error::{Error, Result, io};
use crate::wishes::PauseTo;

/// Where it is, unless the environment says otherwise.
pub const PATH: &str = "/etc/cube/config.toml";
/// The variable that says so.
pub const VARIABLE: &str = "CUBE_CONFIG";

/// All settings. Each has a default, so that no file is needed after `make install`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The VMM.
    pub vmm: PathBuf,
    /// The guest's kernel.
    pub kernel: PathBuf,
    /// The guest's root image, with `cube-oci` in it.
    pub initrd: PathBuf,
    /// Processors of a sandbox whose containers have no limit.
    pub cpus: u32,
    /// MiB of memory of a sandbox whose containers have no limit.
    pub memory_mib: u64,
    /// MiB of memory that a guest's kernel and agent need beside the containers.
    pub overhead_mib: u64,
    /// The most processors that a sandbox gets.
    pub max_cpus: u32,
    /// The most MiB of memory that a sandbox gets.
    pub max_memory_mib: u64,
    /// How long a guest may take to boot, in seconds.
    pub boot_timeout_s: u64,
    /// Where a pause leaves a sandbox whose containers do not say.
    pub pause_to: PauseTo,
    /// The folder for the states of sandboxes that are paused to disk.
    pub pause_dir: PathBuf,
    /// How long the ports that a sandbox shall answer at may take after a resume, in seconds.
    pub resume_timeout_s: u64,
    /// Folders below which annotations may name checkpoints and kernels: who makes a pod is not
    /// always trusted with the files of the host.
    pub annotation_dirs: Vec<PathBuf>,
    /// More options for `cube-vmm start`.
    pub vmm_options: Vec<String>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            vmm: "/usr/local/bin/cube-vmm".into(),
            kernel: "/usr/local/share/cube/vmlinux".into(),
            initrd: "/usr/local/share/cube/container.cpio".into(),
            cpus: 1,
            memory_mib: 512,
            overhead_mib: 128,
            max_cpus: 64,
            max_memory_mib: 1 << 20,
            boot_timeout_s: 60,
            pause_to: PauseTo::Memory,
            pause_dir: "/var/lib/cube/paused".into(),
            resume_timeout_s: 30,
            annotation_dirs: vec!["/var/lib/cube".into()],
            vmm_options: Vec::new(),
        }
    }
}

impl Config {
    /// Reads the file, or takes the defaults if there is none and nobody has named one.
    pub fn load() -> Result<Self> {
        match std::env::var_os(VARIABLE) {
            Some(path) => Self::read(Path::new(&path)),
            None if Path::new(PATH).exists() => Self::read(Path::new(PATH)),
            None => Ok(Self::default()),
        }
    }

    fn read(path: &Path) -> Result<Self> {
        let invalid = |why: String| Error::Invalid(format!("{}: {why}", path.display()));
        let text = std::fs::read_to_string(path).map_err(|error| invalid(error.to_string()))?;
        toml::from_str::<Self>(&text)
            .map_err(|error| invalid(error.to_string().trim().replace('\n', " ")))?
            .check()
            .map_err(invalid)
    }

    /// Refuses a path that an annotation may not name, whatever links it leads over.
    pub fn check_named(&self, annotation: &str, path: &Path) -> Result<()> {
        let refused = |why: String| {
            Error::Invalid(format!("the annotation {annotation} names {}: {why}", path.display()))
        };
        let real = path.canonicalize().map_err(|error| refused(error.to_string()))?;
        let within = |dir: &PathBuf| dir.canonicalize().is_ok_and(|dir| real.starts_with(dir));
        if self.annotation_dirs.iter().any(within) {
            return Ok(());
        }
        Err(refused(format!(
            "it is not below {:?}; move it there, or add its folder to annotation_dirs in {PATH}",
            self.annotation_dirs
        )))
    }

    /// The folder that an annotation wants to be made, without links on the way to it. Refuses one
    /// that annotations may not name.
    pub fn check_new(&self, annotation: &str, path: &Path) -> Result<PathBuf> {
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(Error::Invalid(format!(
                "the annotation {annotation} names {}, which is no new folder",
                path.display()
            )));
        };
        self.check_named(annotation, parent)?;
        let parent = parent.canonicalize().map_err(io(format!("find {}", parent.display())))?;
        let folder = parent.join(name);
        // What is there already must not lead elsewhere.
        if folder.symlink_metadata().is_ok() {
            self.check_named(annotation, &folder)?;
        }
        Ok(folder)
    }

    fn check(self) -> std::result::Result<Self, String> {
        if self.cpus == 0 || self.cpus > self.max_cpus {
            return Err(format!("cpus is {}, expected 1 to {}", self.cpus, self.max_cpus));
        }
        if self.memory_mib < 64 || self.memory_mib > self.max_memory_mib {
            let (memory, most) = (self.memory_mib, self.max_memory_mib);
            return Err(format!("memory_mib is {memory}, expected 64 to {most}"));
        }
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Config> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.toml");
        std::fs::write(&path, text).unwrap();
        Config::read(&path)
    }

    #[test]
    fn what_is_not_said_has_its_default() {
        let config = read("cpus = 2\nkernel = \"/k\"").unwrap();
        let expected = Config { cpus: 2, kernel: "/k".into(), ..Config::default() };
        assert_eq!(config, expected);
    }

    #[test]
    fn the_file_that_is_installed_has_the_defaults() {
        assert_eq!(read(include_str!("../install/config.toml")).unwrap(), Config::default());
    }

    #[test]
    fn a_new_folder_is_made_where_annotations_may_name_files_only() {
        let (dir, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let config = Config { annotation_dirs: vec![dir.path().into()], ..Config::default() };
        let new = |path: &Path| config.check_new("cube.x", path);
        let real = dir.path().canonicalize().unwrap();
        assert_eq!(new(&dir.path().join("one")).unwrap(), real.join("one"));
        std::os::unix::fs::symlink(elsewhere.path(), dir.path().join("link")).unwrap();
        for refused in [
            elsewhere.path().join("one"),
            dir.path().join("link"),
            dir.path().join("link/one"),
            dir.path().join("none/one"),
            dir.path().join("one/.."),
            PathBuf::from("/"),
        ] {
            let error = new(&refused).unwrap_err();
            assert!(matches!(error, Error::Invalid(_)), "{refused:?}: {error:?}");
            assert!(error.to_string().contains("cube.x"), "{error}");
        }
    }

    #[test]
    fn an_unknown_setting_is_named() {
        let error = read("cpu = 2").unwrap_err().to_string();
        assert!(error.contains("unknown field `cpu`"), "{error}");
    }

    #[test]
    fn an_absurd_setting_is_named_with_what_is_expected() {
        let error = read("cpus = 0").unwrap_err().to_string();
        assert!(error.ends_with("cpus is 0, expected 1 to 64"), "{error}");
        let error = read("memory_mib = 1").unwrap_err().to_string();
        assert!(error.contains("memory_mib is 1, expected 64 to"), "{error}");
    }
}
