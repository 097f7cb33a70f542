//! How large a VM is: from the limits of what will run in it.

use serde_json::Value;

use crate::annotations::Resources;
use crate::config::Config;
use crate::error::{Error, Result};

/// CRI says these of a whole pod on its sandbox container.
const POD_QUOTA: &str = "io.kubernetes.cri.sandbox-cpu-quota";
const POD_PERIOD: &str = "io.kubernetes.cri.sandbox-cpu-period";
const POD_MEMORY: &str = "io.kubernetes.cri.sandbox-memory";

/// The kernel's default for a period, in microseconds.
const PERIOD: i64 = 100_000;

/// The size of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Processors.
    pub cpus: u32,
    /// MiB of memory, what the guest itself needs included.
    pub memory_mib: u64,
}

impl Size {
    /// What a sandbox whose first container has this spec needs.
    pub fn of(spec: &Value, config: &Config) -> Result<Self> {
        let limits = Limits::of(spec);
        let whole = Resources::of(spec)?;
        let cpus = whole.map(|whole| whole.cpu).or_else(|| limits.cpus()).unwrap_or(config.cpus);
        if cpus > config.max_cpus {
            return Err(Error::Invalid(format!(
                "the limit of {cpus} processors is more than a sandbox may have, which is {}; \
                 lower the limit or raise max_cpus",
                config.max_cpus
            )));
        }
        let memory_mib = match (whole, limits.memory) {
            (Some(whole), _) => whole.memory.saturating_add(whole.memory % 2),
            (None, Some(bytes)) => {
                (bytes >> 20).saturating_add(config.overhead_mib).next_multiple_of(2)
            }
            (None, None) => config.memory_mib,
        };
        if memory_mib > config.max_memory_mib {
            return Err(Error::Invalid(format!(
                "the memory limit makes a VM of {memory_mib} MiB, more than a sandbox may have, \
                 which is {}; lower the limit or raise max_memory_mib",
                config.max_memory_mib
            )));
        }
        Ok(Self { cpus, memory_mib: memory_mib.max(64) })
    }
}

/// What a spec limits; `None` where it does not.
#[derive(Default)]
struct Limits {
    quota: Option<i64>,
    period: Option<i64>,
    memory: Option<u64>,
}

impl Limits {
    fn of(spec: &Value) -> Self {
        let annotation = |name: &str| spec["annotations"][name].as_str()?.parse::<i64>().ok();
        let resources = &spec["linux"]["resources"];
        let number = |of_pod: &str, of_container: &Value| {
            annotation(of_pod).or_else(|| of_container.as_i64()).filter(|number| *number > 0)
        };
        Self {
            quota: number(POD_QUOTA, &resources["cpu"]["quota"]),
            period: number(POD_PERIOD, &resources["cpu"]["period"]),
            memory: number(POD_MEMORY, &resources["memory"]["limit"])
                .and_then(|bytes| u64::try_from(bytes).ok()),
        }
    }

    /// Rounded up: less than a processor is one.
    fn cpus(&self) -> Option<u32> {
        let (quota, period) = (self.quota?, self.period.unwrap_or(PERIOD));
        let cpus = quota.saturating_add(period - 1) / period;
        Some(u32::try_from(cpus).unwrap_or(u32::MAX))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn size(spec: &Value) -> Size {
        Size::of(spec, &Config::default()).unwrap()
    }

    #[test]
    fn without_limits_the_defaults_hold() {
        assert_eq!(size(&json!({})), Size { cpus: 1, memory_mib: 512 });
        let unlimited = json!({"linux": {"resources": {"cpu": {"quota": -1}}}});
        assert_eq!(size(&unlimited).cpus, 1);
    }

    #[test]
    fn limits_are_rounded_up_and_the_guest_itself_is_added() {
        let resources = json!({
            "cpu": {"quota": 150_000, "period": 100_000},
            "memory": {"limit": 256 << 20},
        });
        let spec = json!({"linux": {"resources": resources}});
        assert_eq!(size(&spec), Size { cpus: 2, memory_mib: 384 });
    }

    #[test]
    fn a_pod_s_limits_count_more_than_its_sandbox_container_s() {
        let spec = json!({
            "annotations": {POD_QUOTA: "400000", POD_PERIOD: "100000", POD_MEMORY: "1073741824"},
            "linux": {"resources": {"memory": {"limit": 1 << 20}}},
        });
        assert_eq!(size(&spec), Size { cpus: 4, memory_mib: 1152 });
    }

    #[test]
    fn the_size_of_the_vm_itself_counts_more_than_all_limits() {
        let spec = json!({
            "annotations": {"cube.vmmres": "{\"cpu\":3,\"memory\":1001}"},
            "linux": {"resources": {"memory": {"limit": 1 << 20}}},
        });
        assert_eq!(size(&spec), Size { cpus: 3, memory_mib: 1002 });
    }

    #[test]
    fn an_absurd_limit_is_refused_with_its_number() {
        let spec = json!({"linux": {"resources": {"cpu": {"quota": i64::MAX, "period": 1}}}});
        let error = Size::of(&spec, &Config::default()).unwrap_err().to_string();
        assert!(error.starts_with("the limit of 4294967295 processors"), "{error}");
        let spec = json!({"linux": {"resources": {"memory": {"limit": i64::MAX}}}});
        assert!(Size::of(&spec, &Config::default()).is_err());
    }
}
