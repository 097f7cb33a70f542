//! The cases of pjdfstest, on a share that is restored again and again under them, beside the file system
//! that the share is on. `CUBE_PJDFSTEST` names the program (`cargo install pjdfstest`); without it the
//! test is not there.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use cube_fsd::share::Settings;

use crate::mounted::Mounted;

/// What this host's kernel and file systems are expected to have; the users are those of any Debian.
const CONFIGURATION: &str = r#"
[settings]
naptime = 0.02
[features]
posix_fallocate = {}
rename_ctime = {}
utimensat = {}
utime_now = {}
[dummy_auth]
entries = [["nobody", "nogroup"], ["daemon", "daemon"], ["bin", "bin"]]
"#;

/// By case: `ok`, `FAILED` or `skipped`.
type Results = BTreeMap<String, String>;

/// Runs all cases in `directory`, and does something every now and then meanwhile.
fn cases(program: &str, directory: &Path, mut meanwhile: impl FnMut()) -> Results {
    let place = tempfile::tempdir().unwrap();
    let (configuration, output) = (place.path().join("toml"), place.path().join("output"));
    fs::write(&configuration, CONFIGURATION).unwrap();
    let mut command = Command::new(program);
    command.arg("-c").arg(&configuration).arg("-p").arg(directory);
    let told = fs::File::create(&output).unwrap();
    let mut child = command.stdout(told).stderr(Stdio::null()).spawn().unwrap();
    while child.try_wait().unwrap().is_none() {
        std::thread::sleep(Duration::from_millis(20));
        meanwhile();
    }
    let text = fs::read_to_string(&output).unwrap();
    let result = |line: &str| {
        let (case, result) = line.rsplit_once(' ')?;
        let known = ["ok", "FAILED", "skipped"].contains(&result) && case.contains("::");
        known.then(|| (case.trim().to_owned(), result.to_owned()))
    };
    text.lines().filter_map(result).collect()
}

/// The fail list is that of the file system below, whatever is restored meanwhile.
pub fn pjdfstest() {
    let program = std::env::var("CUBE_PJDFSTEST").unwrap();
    let mounted = Mounted::new(Settings::default());
    let below = cases(&program, &mounted.other(), || ());
    assert!(below.len() > 300, "{below:?}");
    let mut restores = 0;
    let share = cases(&program, &mounted.at(""), || {
        let report = mounted.restored(|| ());
        // What has no name any more, and is not open, nobody can find.
        let lost = report.stale.iter().find(|stale| !stale.path.starts_with("(node"));
        assert_eq!(lost, None, "after {restores} restores");
        restores += 1;
    });
    let failed = |results: &Results| -> Vec<String> {
        let failed = results.iter().filter(|(_, result)| *result == "FAILED");
        failed.map(|(case, _)| case.clone()).collect()
    };
    let (below_failed, share_failed) = (failed(&below), failed(&share));
    let only = |one: &[String], other: &[String]| -> Vec<String> {
        one.iter().filter(|case| !other.contains(case)).cloned().collect()
    };
    eprintln!(
        "{} cases, {restores} restores; failed below: {below_failed:#?}; on the share only: {:#?}; \
         below only: {:#?}",
        share.len(),
        only(&share_failed, &below_failed),
        only(&below_failed, &share_failed),
    );
    assert!(restores > 10, "{restores}");
    assert_eq!(share.len(), below.len());
    // No device nodes are made in a share.
    let of_devices = |case: &String| case.ends_with("::block") || case.ends_with("::char");
    let mut others = only(&share_failed, &below_failed);
    others.retain(|case| !of_devices(case));
    assert_eq!(others, [""; 0]);
}
