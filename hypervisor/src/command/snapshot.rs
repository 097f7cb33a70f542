//! `cube-vmm snapshot`: a VM becomes a folder, and what can be asked about such folders.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize;

use super::client::print;
use super::hot::{self, HotInfo, HotOptions};
use crate::api::{MemoryMethod, Reply, Request, SnapshotReport, SnapshotRequest};
use crate::api_socket::request;
use crate::config::ShareConfig;
use crate::shares::default_program;
use crate::snapshot::disks::NO_COPY;
use crate::snapshot::folder::Durability;
use crate::snapshot::hot::HotSet;
use crate::snapshot::inspect::{self, About, Listed};
use crate::snapshot::manifest::SavedDisk;
use crate::snapshot::merge;
use crate::snapshot::shares::{SavedShare, shares};

/// What `snapshot --help` ends with.
pub const HELP: &str = "\
The VM stands still while memory and state are copied, and goes on while they are brought to the disk.
If anything fails it goes on as well, and nothing is left of the folder.

Disks that can be written are copied at the same instant, into the folder unless --disk-clone says
where. On file systems that share blocks (XFS, btrfs) such a copy costs no time and no room; elsewhere
all but its holes is copied while the guest stands still, which is told. Read-only disks and the
root file system are referred to by their paths and must be as they are when it is restored.
Persistent memory must be read-only.

A difference (--diff-of) has only the pages of memory that differ from another snapshot of the same VM.
From then on, or with --track, changes are tracked, which costs the guest an exit for each page that
it writes to first after a snapshot. Without, both are compared, which takes longer. A VM can be made of it
once it is merged.

Hot pages are those that the guest of a restored VM has touched so far. snapshot hot writes which they are
into the folder that it was restored from; restore --prefetch brings them in sooner from then on. They
are of that one snapshot: neither a merge nor a new snapshot takes them over.

Examples:
  cube-vmm snapshot --api-socket S base
  cube-vmm snapshot --api-socket S two --diff-of base
  cube-vmm snapshot --api-socket S base --disk-clone data=/vm/data.1 --disk-clone scratch=none
  cube-vmm snapshot merge base two whole && cube-vmm restore whole --api-socket T --resume
  cube-vmm snapshot info base
  cube-vmm snapshot verify base
  cube-vmm snapshot hot --api-socket T && cube-vmm restore base --api-socket U --resume --prefetch
  cube-vmm snapshot list /var/lib/snapshots";

/// Options of `snapshot`.
#[derive(Args, Clone, Debug)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct SnapshotOptions {
    /// What to do with a folder that is there.
    #[command(subcommand)]
    pub action: Option<Action>,

    /// Or how to make one.
    #[command(flatten)]
    pub save: SaveOptions,
}

/// Options of `snapshot DIR`.
#[derive(Args, Clone, Debug)]
pub struct SaveOptions {
    /// The control socket of the VM
    #[arg(long, value_name = "PATH", required = true)]
    pub api_socket: Option<PathBuf>,

    /// The folder to write; must not exist
    #[arg(value_name = "DIR", required = true)]
    pub dir: Option<PathBuf>,

    /// Leave the VM paused
    #[arg(long)]
    pub keep_paused: bool,

    /// What the snapshot survives once this command has ended
    #[arg(long, value_enum, default_value_t = DurabilityOption::Fsync)]
    pub durability: DurabilityOption,

    /// Write only the pages of memory that differ from this snapshot of the same VM
    #[arg(long, value_name = "BASE")]
    pub diff_of: Option<PathBuf>,

    /// Track changes from now on, so that the next difference is quick
    #[arg(long)]
    pub track: bool,

    /// Where the copy of a disk goes, or that there shall be none; may be repeated
    #[arg(long = "disk-clone", value_name = "ID=FILE|ID=none")]
    pub disk_clones: Vec<String>,

    /// Print what it has cost as JSON
    #[arg(long)]
    pub json: bool,
}

/// See [`Durability`].
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum DurabilityOption {
    /// A crash of the host
    Fsync,
    /// The end of the VM, but not of the host; sooner done
    None,
}

impl From<DurabilityOption> for Durability {
    fn from(option: DurabilityOption) -> Self {
        match option {
            DurabilityOption::Fsync => Self::Fsync,
            DurabilityOption::None => Self::None,
        }
    }
}

/// What can be done with folders.
#[derive(Clone, Debug, Subcommand)]
pub enum Action {
    /// Tell what a snapshot is
    Info {
        /// The snapshot
        dir: PathBuf,
        /// Print JSON
        #[arg(long)]
        json: bool,
        /// The file server, which tells what shares hold [default: cube-fsd beside this program]
        #[arg(long, value_name = "FILE", env = "CUBE_FSD")]
        fsd: Option<PathBuf>,
    },
    /// Read all of a snapshot and compare it with its checksums
    Verify {
        /// The snapshot
        dir: PathBuf,
    },
    /// Make one whole snapshot of one and those that are differences to it
    Merge {
        /// The whole one
        base: PathBuf,
        /// Differences, of which each is one to that before it
        #[arg(required = true, value_name = "DIFF")]
        differences: Vec<PathBuf>,
        /// The folder to write; must not exist
        #[arg(value_name = "OUT")]
        out: PathBuf,
        /// What the new one survives once this command has ended
        #[arg(long, value_enum, default_value_t = DurabilityOption::Fsync)]
        durability: DurabilityOption,
    },
    /// Have a restored VM write which pages its guest has touched, for restore --prefetch
    Hot(HotOptions),
    /// List the snapshots in a folder
    List {
        /// The folder
        folder: PathBuf,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// Does what was asked for.
pub fn snapshot(options: &SnapshotOptions) -> anyhow::Result<u8> {
    match &options.action {
        Some(Action::Info { dir, json, fsd }) => {
            let about = inspect::about(dir)?;
            let program = fsd.clone().unwrap_or_else(default_program);
            let shares = shares(dir, &about.manifest, &program)?;
            let hot = HotSet::in_folder(dir, &about.manifest);
            print(&match json {
                true => as_json(&Info { about, shares, hot: HotInfo::of(hot) })?,
                false => {
                    let shares = shares.iter().map(describe_share);
                    describe(&about) + &hot::describe(hot) + &shares.collect::<String>()
                }
            })
        }
        Some(Action::Verify { dir }) => {
            let bytes = inspect::verify(dir)?;
            print(&format!("{}: whole, {} checked\n", dir.display(), size(bytes)))
        }
        Some(Action::Merge { base, differences, out, durability }) => {
            merge::merge(base, differences, out, (*durability).into())?;
            Ok(0)
        }
        Some(Action::Hot(options)) => hot::hot(options),
        Some(Action::List { folder, json }) => {
            let listed = inspect::list(folder)?;
            print(&if *json { as_json(&listed)? } else { table(&listed) })
        }
        None => take(&options.save),
    }
}

/// All that is told of a snapshot.
#[derive(Serialize)]
struct Info {
    #[serde(flatten)]
    about: About,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    shares: Vec<SavedShare>,
    #[serde(skip_serializing_if = "Option::is_none")]
    hot: Option<HotInfo>,
}

/// A line on a share, and one on each file that is open in it, of the first ten.
fn describe_share(share: &SavedShare) -> String {
    const MOST: usize = 10;
    let ShareConfig { id, tag, path, .. } = &share.config;
    let line = |what: &str, value: &str| format!("{what:<10}{value}\n");
    let place = format!("{id}: {tag:?} is {}", path.display());
    let content = match &share.content {
        Some(content) => content,
        None => {
            let why = share.error.as_deref().unwrap_or("nothing is told");
            return line("share", &format!("{place}; what it holds cannot be told: {why}"));
        }
    };
    if content["mounted"] == false {
        return line("share", &format!("{place}; not mounted"));
    }
    let number = |name: &str| content[name].as_u64().unwrap_or(0);
    let mut text = format!("{place}; {} files known, {} open", number("nodes"), number("handles"));
    if number("orphans") > 0 {
        let bytes = size(number("orphan_bytes"));
        let _ = write!(text, ", {} without a name ({bytes})", number("orphans"));
    }
    if number("stale") > 0 {
        let _ = write!(text, ", {} gone", number("stale"));
    }
    let mut lines = line("share", &text);
    let open = content["open"].as_array().map(Vec::as_slice).unwrap_or_default();
    for path in open.iter().take(MOST) {
        // Quoted: a name can hold whatever a guest likes.
        lines += &line("", &format!("  open: {path}"));
    }
    if open.len() > MOST {
        lines += &line("", "  …");
    }
    lines
}

fn as_json(value: &impl Serialize) -> anyhow::Result<String> {
    Ok(serde_json::to_string_pretty(value)? + "\n")
}

/// Writes a VM into a folder.
fn take(options: &SaveOptions) -> anyhow::Result<u8> {
    // The parser asks for both unless there is a subcommand.
    let (Some(socket), Some(dir)) = (&options.api_socket, &options.dir) else {
        anyhow::bail!("which VM, and into which folder? see cube-vmm snapshot --help");
    };
    let mut asked = SnapshotRequest {
        keep_paused: options.keep_paused,
        track: options.track,
        durability: options.durability.into(),
        // The VM may have been started elsewhere.
        ..SnapshotRequest::new(std::path::absolute(dir)?)
    };
    if let Some(base) = &options.diff_of {
        asked.diff_of = Some(std::path::absolute(base)?);
    }
    asked.disk_clones = disk_clones(&options.disk_clones)?;
    match request(socket, &Request::Snapshot(asked))? {
        Reply::Saved(report) if options.json => print(&as_json(&*report)?),
        Reply::Saved(report) => print(&told(&report)),
        Reply::Error { message, .. } => anyhow::bail!("{message}"),
        other => anyhow::bail!("the VM answered snapshot with {other:?}"),
    }
}

fn disk_clones(texts: &[String]) -> anyhow::Result<BTreeMap<String, PathBuf>> {
    let mut places = BTreeMap::new();
    for text in texts {
        let Some((id, place)) = text.split_once('=').filter(|(_, place)| !place.is_empty()) else {
            anyhow::bail!("disk clone {text:?} is not understood; write ID=FILE or ID=none");
        };
        let place = match place {
            NO_COPY => PathBuf::from(place),
            path => std::path::absolute(path)?,
        };
        if places.insert(id.to_owned(), place).is_some() {
            anyhow::bail!("disk clone {text:?} is the second of disk {id:?}; leave one out");
        }
    }
    Ok(places)
}

/// Bytes for people.
pub(super) fn size(bytes: u64) -> String {
    let mut value = bytes as f64;
    let mut unit = "bytes";
    for next in ["KiB", "MiB", "GiB", "TiB"] {
        if value < 1024.0 {
            break;
        }
        (value, unit) = (value / 1024.0, next);
    }
    if unit == "bytes" { format!("{bytes} bytes") } else { format!("{value:.1} {unit}") }
}

fn told(report: &SnapshotReport) -> String {
    let mut text = format!("{} of memory", size(report.memory_bytes));
    text.push_str(match report.memory {
        MemoryMethod::Whole => "",
        MemoryMethod::Log => " (what has changed, from the log)",
        MemoryMethod::Mapping => " (what has changed, from the mapping)",
        MemoryMethod::Compared => " (what has changed, by comparing)",
    });
    let seconds = |micros: u64| micros as f64 / 1e6;
    // Writing to a string does not fail.
    let _ = write!(text, " in {:.3} s", seconds(report.total_us));
    if let Some(paused) = report.paused_us {
        let _ = write!(text, "; the guest stood still for {:.3} s", seconds(paused));
    }
    text.push('\n');
    for SavedDisk { id, path, bytes, shared } in &report.disks {
        let how = match shared {
            true => "shares its blocks",
            false => "was copied, since the file system does not share blocks",
        };
        let _ = writeln!(text, "disk {id}: {} in {}, {how}", size(*bytes), path.display());
    }
    text
}

/// A point in time as RFC 3339 has it, in UTC.
fn date(unix_nanos: u64) -> String {
    let seconds = unix_nanos / 1_000_000_000;
    let (days, second) = (seconds / 86400, seconds % 86400);
    // Years of 400 that begin on the first of March, so that the leap day is the last of its year.
    let days = days + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year + 400 * era + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

fn name(dir: &Path) -> String {
    dir.file_name().unwrap_or(dir.as_os_str()).to_string_lossy().into_owned()
}

fn describe(about: &About) -> String {
    let manifest = &about.manifest;
    let config = &manifest.config;
    let mut lines = vec![
        ("snapshot", about.dir.display().to_string()),
        ("id", manifest.id.clone()),
        ("taken", format!("{} by cube-vmm {}", date(manifest.taken_unix_nanos), manifest.vmm)),
        (
            "memory",
            match &manifest.parent {
                None => format!("{}, whole", config.memory),
                Some(parent) => format!(
                    "{}, of which {} differ from {} ({})",
                    config.memory,
                    size(parent.pages_bytes),
                    parent.id,
                    parent.dir.display()
                ),
            },
        ),
        ("stored", size(about.stored_bytes)),
        (
            "checksums",
            match manifest.sums_crc64 {
                Some(_) => "of state and memory".to_owned(),
                None => "of the state only".to_owned(),
            },
        ),
        ("machine", format!("{} vCPUs, {:?}", config.cpus, config.transport).to_lowercase()),
    ];
    for disk in config.all_disks() {
        let copy = manifest.disks.iter().find(|saved| saved.id == disk.id);
        lines.push((
            "disk",
            match copy {
                Some(copy) => {
                    format!("{}: {} in {}", disk.id, size(copy.bytes), copy.path.display())
                }
                None => format!("{}: not copied, {}", disk.id, disk.path.display()),
            },
        ));
    }
    for pmem in config.all_pmem() {
        lines.push(("pmem", format!("{}: {}", pmem.id, pmem.path.display())));
    }
    for card in config.all_net() {
        lines.push(("net", card.id));
    }
    lines.iter().map(|(what, value)| format!("{what:<10}{value}\n")).collect()
}

fn table(listed: &[Listed]) -> String {
    let row = |dir: &Path, taken: &str, kind: &str, memory: &str, stored: &str| {
        format!("{:<24} {taken:<21} {kind:<8} {memory:>8} {stored:>11}\n", name(dir))
    };
    let mut text = row(Path::new("NAME"), "TAKEN", "MEMORY", "OF", "STORED");
    for one in listed {
        text += &match one {
            Listed::Snapshot(about) => {
                let manifest = &about.manifest;
                let kind = if manifest.parent.is_some() { "differs" } else { "whole" };
                let memory = manifest.config.memory.to_string();
                let taken = date(manifest.taken_unix_nanos);
                row(&about.dir, &taken, kind, &memory, &size(about.stored_bytes))
            }
            Listed::BeingWritten(dir) => format!("{:<24} is being written\n", name(dir)),
            Listed::LeftBehind(dir) => format!("{:<24} was never completed\n", name(dir)),
            Listed::Refused { dir, why } => format!("{:<24} {why}\n", name(dir)),
        };
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        let date = |seconds: u64| date(seconds * 1_000_000_000);
        assert_eq!(date(0), "1970-01-01T00:00:00Z");
        assert_eq!(date(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(date(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(date(1_709_251_200), "2024-03-01T00:00:00Z");
        assert_eq!(date(1_796_057_961), "2026-11-30T16:59:21Z");
    }

    #[test]
    fn places_of_copies_are_read() {
        let texts =
            |texts: &[&str]| -> Vec<String> { texts.iter().map(|&text| text.to_owned()).collect() };
        let read = disk_clones(&texts(&["a=/x=y", "b=none"])).unwrap();
        assert_eq!(read["a"], PathBuf::from("/x=y"));
        assert_eq!(read["b"], PathBuf::from("none"));
        for bad in [&["a"][..], &["a="], &["a=/x", "a=none"]] {
            assert!(disk_clones(&texts(bad)).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn sizes_are_told_in_the_unit_that_fits() {
        let sizes = [0, 1023, 1024, 35 << 20, 3 << 30].map(size);
        assert_eq!(sizes, ["0 bytes", "1023 bytes", "1.0 KiB", "35.0 MiB", "3.0 GiB"]);
    }
}
