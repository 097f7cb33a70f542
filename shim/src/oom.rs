//! Whom the kernel kills when the host runs out of memory: a VMM, which has the memory, before its
//! shim, which has little and tells of it, and both before containerd.

use std::fs;
use std::io;

/// The kernel's highest score, proc_pid_oom_score_adj(5).
const MOST: i32 = 1000;

/// Makes a process that has inherited its score likelier to be killed than its parent. That this
/// fails is a reason to run nothing on no host, so it is only told.
pub fn volunteer(pid: u32) {
    if let Err(error) = raise(pid) {
        tracing::warn!(%error, pid, "the process's OOM score stays as it was");
    }
}

fn raise(pid: u32) -> io::Result<()> {
    let path = format!("/proc/{pid}/oom_score_adj");
    let score: i32 = fs::read_to_string(&path)?.trim().parse().map_err(io::Error::other)?;
    fs::write(path, score.saturating_add(1).min(MOST).to_string())
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_process_goes_before_its_parent() {
        let score = |pid: u32| -> i32 {
            let text = fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).unwrap();
            text.trim().parse().unwrap()
        };
        let mut child = Command::new("sleep").arg("100").spawn().unwrap();
        volunteer(child.id());
        let (its, ours) = (score(child.id()), score(std::process::id()));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(its, (ours + 1).min(MOST));
        // One that is gone is no reason to fail.
        volunteer(child.id());
    }
}
