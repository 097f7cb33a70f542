//! What a container has used, from the files of its control group (cgroup-v2.rst).

use crate::cgroup::{Cgroup, number};
use crate::error::Error;
use crate::record::Id;
use crate::state;
use serde::Serialize;
use std::collections::BTreeMap;

/// The answer of `stats`. Memory in bytes, times in microseconds; a limit that is not set is null.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Stats {
    memory: Memory,
    cpu: Cpu,
    pids: Pids,
    io: Vec<Io>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Memory {
    usage: u64,
    limit: Option<u64>,
    peak: u64,
    swap_usage: u64,
    swap_limit: Option<u64>,
    /// What can be taken back without a loss; containerd's working set is usage without this.
    inactive_file: u64,
    /// All of `memory.stat`.
    stat: BTreeMap<String, u64>,
    events: Events,
}

/// `memory.events`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Events {
    low: u64,
    high: u64,
    max: u64,
    oom: u64,
    oom_kill: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Cpu {
    usage_usec: u64,
    user_usec: u64,
    system_usec: u64,
    nr_periods: u64,
    nr_throttled: u64,
    throttled_usec: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Pids {
    current: u64,
    limit: Option<u64>,
}

/// Of one disk of the guest's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Io {
    major: u32,
    minor: u32,
    rbytes: u64,
    wbytes: u64,
    rios: u64,
    wios: u64,
    dbytes: u64,
    dios: u64,
}

/// Looks.
///
/// # Errors
/// [`Error::NoContainer`].
pub fn look(id: &Id) -> Result<Stats, Error> {
    state::look(id, None)?;
    let cgroup = Cgroup::of(id);
    let single = |name: &str| cgroup.read(name).trim().parse().ok();
    let events = cgroup.read("memory.events");
    let stat = parse_all(&cgroup.read("memory.stat"));
    let cpu = cgroup.read("cpu.stat");
    Ok(Stats {
        memory: Memory {
            usage: single("memory.current").unwrap_or(0),
            limit: single("memory.max"),
            peak: single("memory.peak").unwrap_or(0),
            swap_usage: single("memory.swap.current").unwrap_or(0),
            swap_limit: single("memory.swap.max"),
            inactive_file: stat.get("inactive_file").copied().unwrap_or(0),
            stat,
            events: Events {
                low: number(&events, "low"),
                high: number(&events, "high"),
                max: number(&events, "max"),
                oom: number(&events, "oom"),
                oom_kill: number(&events, "oom_kill"),
            },
        },
        cpu: Cpu {
            usage_usec: number(&cpu, "usage_usec"),
            user_usec: number(&cpu, "user_usec"),
            system_usec: number(&cpu, "system_usec"),
            nr_periods: number(&cpu, "nr_periods"),
            nr_throttled: number(&cpu, "nr_throttled"),
            throttled_usec: number(&cpu, "throttled_usec"),
        },
        pids: Pids { current: single("pids.current").unwrap_or(0), limit: single("pids.max") },
        io: cgroup.read("io.stat").lines().filter_map(parse_io).collect(),
    })
}

fn parse_all(text: &str) -> BTreeMap<String, u64> {
    let line = |line: &str| {
        let (name, value) = line.split_once(' ')?;
        Some((name.to_owned(), value.trim().parse().ok()?))
    };
    text.lines().filter_map(line).collect()
}

/// A line such as `254:0 rbytes=4096 wbytes=0 rios=1 wios=0 dbytes=0 dios=0`.
fn parse_io(line: &str) -> Option<Io> {
    let mut words = line.split_whitespace();
    let (major, minor) = words.next()?.split_once(':')?;
    let values: BTreeMap<&str, u64> = words
        .filter_map(|word| {
            let (name, value) = word.split_once('=')?;
            Some((name, value.parse().ok()?))
        })
        .collect();
    let value = |name: &str| values.get(name).copied().unwrap_or(0);
    Some(Io {
        major: major.parse().ok()?,
        minor: minor.parse().ok()?,
        rbytes: value("rbytes"),
        wbytes: value("wbytes"),
        rios: value("rios"),
        wios: value("wios"),
        dbytes: value("dbytes"),
        dios: value("dios"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_disks_are_read_and_others_passed_over() {
        let io = parse_io("254:16 rbytes=4096 wbytes=8192 rios=1 wios=2 dbytes=0 dios=0").unwrap();
        assert_eq!((io.major, io.minor, io.rbytes, io.wios), (254, 16, 4096, 2));
        assert_eq!((parse_io(""), parse_io("x rbytes=1")), (None, None));
    }

    #[test]
    fn all_numbers_of_a_file_are_kept_by_name() {
        let all = parse_all("anon 4096\ninactive_file 10\nbroken x\n");
        assert_eq!((all.len(), all["inactive_file"]), (2, 10));
    }
}
