//! What is a VM, and what is none.

use super::*;

fn config() -> VmConfig {
    VmConfig {
        cpus: 1,
        memory: MemorySize::default(),
        kernel: "vmlinux".into(),
        initrd: None,
        cmdline_append: String::new(),
        rootfs: None,
        disks: Vec::new(),
        pmem: Vec::new(),
        net: Vec::new(),
        fs: Vec::new(),
        fsd: None,
        fs_allow: Vec::new(),
        balloon: true,
        vsock: None,
        console: Console::Off,
        boot_protocol: BootProtocol::Auto,
        transport: TransportKind::Mmio,
    }
}

#[test]
fn names_given_by_position_stay_when_others_go() {
    let disks = ["/a", "/b"].map(DiskConfig::new).to_vec();
    let mut named = VmConfig { rootfs: Some("/root".into()), disks, ..config() }.named();
    named.disks.remove(0);
    let names = |config: &VmConfig| config.all_disks().into_iter().map(|disk| disk.id);
    assert_eq!(names(&named).collect::<Vec<_>>(), ["rootfs", "disk2"]);
    assert_eq!(named.named(), named);
}

#[test]
fn memory_sizes_are_read_and_written() {
    for (text, bytes, shown) in
        [("256M", 256 << 20, "256M"), ("4G", 4 << 30, "4G"), ("65536k", 64 << 20, "64M")]
    {
        let size: MemorySize = text.parse().unwrap();
        assert_eq!((size.bytes(), size.to_string().as_str()), (bytes, shown));
    }
}

#[test]
fn bad_memory_sizes_name_the_value_and_the_cure() {
    for (text, cure) in [
        ("0", "at least 32M"),
        ("1K", "at least 32M"),
        ("999T", "the most is 4T"),
        ("99999999999999999999T", "with a unit"),
        ("18446744073709551615T", "the most is 4T"),
        ("abc", "with a unit"),
        ("", "with a unit"),
        ("-1M", "with a unit"),
        ("256", "with a unit"),
        ("40961K", "multiple of 4096"),
    ] {
        let error = text.parse::<MemorySize>().unwrap_err().to_string();
        assert!(error.contains(cure), "{text}: {error}");
        assert!(error.contains(text), "{text}: {error}");
    }
}

#[test]
fn validation_finds_what_cannot_be() {
    assert_eq!(config().validate(), Ok(()));
    let cpus = VmConfig { cpus: 0, ..config() };
    assert_eq!(cpus.validate(), Err(ConfigError::Cpus(0)));
    let cpus = VmConfig { cpus: 1000, ..config() };
    assert_eq!(cpus.validate(), Err(ConfigError::Cpus(1000)));
    let long = VmConfig { cmdline_append: "x".repeat(3000), ..config() };
    assert!(matches!(long.validate(), Err(ConfigError::CmdlineTooLong { .. })));
    let control = VmConfig { cmdline_append: "a\nb".into(), ..config() };
    assert_eq!(control.validate(), Err(ConfigError::CmdlineCharacter('\n')));
    let disk: DiskConfig = "path=x,id=a".parse().unwrap();
    let twice = VmConfig { disks: vec![disk.clone(), disk.clone()], ..config() };
    assert_eq!(twice.validate(), Err(ConfigError::DuplicateId("a".into())));
    let disk = DiskConfig { id: String::new(), ..disk };
    let many = VmConfig { disks: vec![disk; 40], ..config() };
    assert!(matches!(many.validate(), Err(ConfigError::TooManyDevices { .. })));
}

#[test]
fn a_configuration_survives_json() {
    let config = VmConfig { rootfs: Some("r.img".into()), ..config() };
    let text = serde_json::to_string(&config).unwrap();
    assert_eq!(serde_json::from_str::<VmConfig>(&text).unwrap(), config);
}
