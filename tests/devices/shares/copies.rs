//! Many guests that go on from one snapshot, with a share in common and one that is each one's own.

use std::fs;

use harness::{Place, TestVm};
use hypervisor::api::{Reply, Request};
use libtest_mimic::Trial;

use super::{folder, restore, run, save, share};

pub fn trials() -> Vec<Trial> {
    harness::trials![p1_copies_have_a_share_in_common_and_one_of_their_own]
}

/// Files that the guest knows when it is saved.
const KNOWN: usize = 1000;

fn copies() -> usize {
    std::env::var("CUBE_COPIES").ok().map_or(3, |text| text.parse().unwrap())
}

fn p1_copies_have_a_share_in_common_and_one_of_their_own() {
    let store = Place::new();
    let (common, template) = (folder(&store, "common"), folder(&store, "template"));
    for number in 0..KNOWN {
        fs::write(common.join(number.to_string()), number.to_string()).unwrap();
    }
    let dir = store.given_path("snapshot");
    let vm = TestVm::builder()
        .option("--fs", share("common", &common, ",ro,id=common"))
        .option("--fs", share("own", &template, ",id=own"))
        .boot();
    run(&vm, "mkdir /common /own; mount -t virtiofs common /common; mount -t virtiofs own /own");
    // A second process reads them all, so that each is known by name and inode.
    run(&vm, "ls -l /common >/dev/null; cat /common/* >/dev/null");
    save(&vm, &dir);
    drop(vm);
    let folders: Vec<_> =
        (0..copies()).map(|number| folder(&store, &format!("own{number}"))).collect();
    let vms: Vec<TestVm> = folders
        .iter()
        .enumerate()
        .map(|(number, own)| {
            fs::write(own.join("name"), number.to_string()).unwrap();
            let other = format!("fs:own=path={},policy=remap", own.display());
            restore(&dir, &["--override", &other])
        })
        .collect();
    let mut micros = Vec::new();
    for (number, (vm, own)) in vms.iter().zip(&folders).enumerate() {
        let line = format!("cat /own/name; cat /common/{number}; echo {number} >/own/written");
        assert_eq!(run(vm, &line), format!("{number}{number}"));
        assert_eq!(fs::read_to_string(own.join("written")).unwrap(), format!("{number}\n"));
        let Reply::Shares { shares } = vm.request(&Request::Shares {}) else { panic!("no shares") };
        let status = shares.iter().find(|share| share.id == "common").unwrap();
        let status = status.status.as_ref().unwrap();
        let known = status["restored"]["restored"].as_u64().unwrap();
        assert!(known > KNOWN as u64, "{status}");
        assert_eq!(status["restored"]["stale_total"], 0, "{status}");
        micros.push(status["restore_micros"].as_u64().unwrap());
    }
    micros.sort_unstable();
    println!("{} files each, restored in {micros:?} us", KNOWN);
    // All of them are alive, and nobody has written where another one looks.
    assert!(vms.iter().all(TestVm::agent_answers));
    assert_eq!(fs::read_dir(&template).unwrap().count(), 0);
    assert!(folders.iter().all(|own| fs::read_dir(own).unwrap().count() == 2));
}
