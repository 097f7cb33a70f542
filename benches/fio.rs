//! `fio` in a guest: a number of requests, and how long they have taken by the guest's clock.

use anyhow::{Context, bail, ensure};

use crate::agent::Agent;

/// Where the image of programs is mounted, its programs are started like this.
pub const LOADER: &str = "/tools/lib/ld.so --library-path /tools/lib /tools/bin";

/// A number of requests.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// What they are, for people.
    pub name: &'static str,
    /// `randread`, `read`, `randwrite` or `write`.
    pub pattern: &'static str,
    /// Bytes of each, as `fio` writes them.
    pub size: &'static str,
    /// How many are on their way at a time.
    pub depth: u32,
    /// How many there are.
    pub count: u64,
}

impl Load {
    /// The same, so many times as much of it.
    pub fn scaled(self, scale: u64) -> Self {
        Self { count: self.count * scale, ..self }
    }

    /// For a table.
    pub fn title(&self) -> String {
        format!("{}: {} requests, {} in flight", self.name, self.count, self.depth)
    }

    /// Sends them to the first `mib` MiB of a file or disk, past the guest's page cache.
    pub fn run(&self, agent: &Agent, engine: &str, file: &str, mib: usize) -> anyhow::Result<u64> {
        let Self { pattern, size, depth, count, .. } = self;
        let report = agent.sh(&format!(
            "cd /tmp && {LOADER}/fio --name=load --filename={file} --direct=1 --ioengine={engine} \
             --thread --rw={pattern} --bs={size} --iodepth={depth} --size={mib}M --io_size=100G \
             --number_ios={count} --norandommap --output-format=json --output=report && \
             sed -n '/^{{/,$p' report"
        ))?;
        self.time(&report)
    }

    /// What the report says of it, in nanoseconds.
    fn time(&self, report: &str) -> anyhow::Result<u64> {
        let report: serde_json::Value = serde_json::from_str(report).context("fio's report")?;
        let way = if self.pattern.ends_with("read") { "read" } else { "write" };
        let done = &report["jobs"][0][way];
        let (Some(ios), Some(rate)) = (done["total_ios"].as_u64(), done["iops"].as_f64()) else {
            bail!("fio's report has no figures: {report}");
        };
        ensure!(ios == self.count && rate > 0.0, "fio has done {ios} requests of {}", self.count);
        Ok((self.count as f64 / rate * 1e9) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOAD: Load =
        Load { name: "reads", pattern: "randread", size: "4k", depth: 1, count: 100 };

    #[test]
    fn the_time_is_told_by_the_number_and_the_rate() {
        let report = r#"{"jobs": [{"read": {"total_ios": 100, "iops": 50.0}}]}"#;
        assert_eq!(LOAD.time(report).unwrap(), 2_000_000_000);
    }

    #[test]
    fn a_report_of_something_else_is_refused() {
        for (report, words) in [
            ("", "fio's report"),
            ("{}", "no figures"),
            (r#"{"jobs": [{"write": {"total_ios": 100, "iops": 50.0}}]}"#, "no figures"),
            (r#"{"jobs": [{"read": {"total_ios": 99, "iops": 50.0}}]}"#, "99 requests of 100"),
        ] {
            let error = LOAD.time(report).unwrap_err().to_string();
            assert!(error.contains(words), "{report}: {error}");
        }
    }
}
