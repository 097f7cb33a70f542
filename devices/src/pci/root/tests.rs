use serde::{Deserialize, Serialize};

use super::super::config::{COMMAND, ConfigRecord};
use super::*;
use crate::snapshot::{Schema, Snapshot};

struct Memory;

impl BusDevice for Memory {
    fn read(&mut self, _: u64, data: &mut [u8]) -> Result<(), AccessError> {
        data.fill(0x5a);
        Ok(())
    }
    fn write(&mut self, _: u64, _: &[u8]) -> Result<(), AccessError> {
        Ok(())
    }
}

struct Function(ConfigSpace);

#[derive(Serialize, Deserialize)]
struct FunctionState {
    config: ConfigRecord,
}

impl Schema for FunctionState {
    const KIND: &'static str = "function";
    const VERSION: u32 = 1;
}

impl Snapshot for Function {
    type State = FunctionState;

    fn save(&self) -> Result<FunctionState, SaveError> {
        Ok(FunctionState { config: self.0.record() })
    }

    fn restore(&mut self, state: FunctionState) -> Result<(), RestoreError> {
        self.0.restore(&state.config);
        Ok(())
    }
}

impl PciFunction for Function {
    fn read_config(&mut self, offset: u16, data: &mut [u8]) {
        self.0.read(usize::from(offset), data);
    }
    fn write_config(&mut self, offset: u16, data: &[u8]) {
        self.0.write(usize::from(offset), data);
    }
    fn window(&self) -> Option<Window> {
        let (base, len) = self.0.window()?;
        Some(Window { base, len, device: Arc::new(Mutex::new(Memory)) })
    }
}

struct Machine {
    bus: Arc<Bus>,
    root: Arc<Mutex<PciRoot>>,
    changes: Arc<Mutex<Vec<WindowChange>>>,
}

fn function(base: u64) -> Box<Function> {
    let id = FunctionId {
        vendor: 0x1af4,
        device: 0x1044,
        subsystem: (0, 0),
        class: [0xff, 0, 0],
        revision: 1,
    };
    let mut config = ConfigSpace::new(id);
    config.add_bar(base, 0x1000);
    Box::new(Function(config))
}

fn machine() -> Machine {
    let bus = Arc::new(Bus::new());
    let changes = Arc::new(Mutex::new(Vec::new()));
    let log = changes.clone();
    let observer = Box::new(move |change| log.lock().unwrap().push(change));
    let mut root = PciRoot::new(&bus, observer);
    assert_eq!(root.insert(DeviceId::new("a"), function(0x8000_0000)), Ok(1));
    Machine { bus, root: Arc::new(Mutex::new(root)), changes }
}

fn at(machine: &Machine, address: u64) -> u8 {
    let mut data = [0];
    machine.bus.read(address, &mut data);
    data[0]
}

const SLOT1: u64 = 1 << 15;

#[test]
fn both_mechanisms_reach_the_same_registers() {
    let machine = machine();
    let mut ports = PortAccess::new(machine.root.clone());
    let mut ecam = EcamAccess::new(machine.root.clone());
    ports.write(0, &(ADDRESS_ENABLE | (1 << 11)).to_le_bytes()).unwrap();
    let (mut by_port, mut by_ecam) = ([0; 2], [0; 2]);
    ports.read(6, &mut by_port).unwrap();
    ecam.read(SLOT1 + 2, &mut by_ecam).unwrap();
    assert_eq!((by_port, by_ecam), ([0x44, 0x10], [0x44, 0x10]));
}

#[test]
fn empty_slots_and_other_functions_are_all_ones() {
    let machine = machine();
    let mut ecam = EcamAccess::new(machine.root.clone());
    for offset in [2 << 15, SLOT1 + (1 << 12)] {
        let mut data = [0; 4];
        ecam.read(offset, &mut data).unwrap();
        assert_eq!(data, [0xff; 4]);
    }
}

#[test]
fn a_window_comes_moves_and_goes_with_the_registers() {
    let machine = machine();
    let mut ecam = EcamAccess::new(machine.root.clone());
    let command = SLOT1 + COMMAND as u64;
    ecam.write(command, &[2, 0]).unwrap();
    assert_eq!(at(&machine, 0x8000_0000), 0x5a);
    ecam.write(SLOT1 + 0x10, &0x9000_0000_u32.to_le_bytes()).unwrap();
    assert_eq!((at(&machine, 0x8000_0000), at(&machine, 0x9000_0000)), (0xff, 0x5a));
    ecam.write(command, &[0, 0]).unwrap();
    assert_eq!(at(&machine, 0x9000_0000), 0xff);
    let moves: Vec<_> =
        machine.changes.lock().unwrap().iter().map(|change| (change.from, change.to)).collect();
    let (a, b) = (Some(0x8000_0000), Some(0x9000_0000));
    assert_eq!(moves, [(None, a), (a, b), (b, None)]);
}

#[test]
fn two_windows_at_one_place_do_not_take_it_from_each_other() {
    let machine = machine();
    let id = DeviceId::new("b");
    machine.root.lock().unwrap().insert(id.clone(), function(0x8000_0000)).unwrap();
    let mut ecam = EcamAccess::new(machine.root.clone());
    ecam.write(SLOT1 + COMMAND as u64, &[2, 0]).unwrap();
    ecam.write((2 << 15) + COMMAND as u64, &[2, 0]).unwrap();
    machine.root.lock().unwrap().remove(&id).unwrap();
    assert_eq!(at(&machine, 0x8000_0000), 0x5a);
}

#[test]
fn a_removed_function_leaves_nothing() {
    let machine = machine();
    let mut ecam = EcamAccess::new(machine.root.clone());
    ecam.write(SLOT1 + COMMAND as u64, &[2, 0]).unwrap();
    machine.root.lock().unwrap().remove(&DeviceId::new("a")).unwrap();
    assert_eq!(at(&machine, 0x8000_0000), 0xff);
    assert!(machine.root.lock().unwrap().remove(&DeviceId::new("a")).is_err());
}

#[test]
fn a_restored_bus_has_its_functions_where_they_were() {
    let old = machine();
    let id = DeviceId::new("b");
    old.root.lock().unwrap().insert(id.clone(), function(0x8000_0000)).unwrap();
    old.root.lock().unwrap().remove(&DeviceId::new("a")).unwrap();
    let mut ecam = EcamAccess::new(old.root.clone());
    ecam.write((2 << 15) + 0x10, &0x9000_0000_u32.to_le_bytes()).unwrap();
    ecam.write((2 << 15) + COMMAND as u64, &[2, 0]).unwrap();
    let saved = old.root.lock().unwrap().save().unwrap();

    let new = machine();
    let mut root = new.root.lock().unwrap();
    root.remove(&DeviceId::new("a")).unwrap();
    root.insert_at(2, id.clone(), function(0x8000_0000)).unwrap();
    for taken in [0, 2, SLOTS] {
        let error = root.insert_at(taken, id.clone(), function(0)).unwrap_err();
        assert_eq!(error, SlotError::Taken(taken));
    }
    for (slot, device, record) in saved {
        assert_eq!((slot, &device), (2, &id));
        root.restore(slot, record).unwrap();
    }
    drop(root);
    assert_eq!((at(&new, 0x8000_0000), at(&new, 0x9000_0000)), (0xff, 0x5a));
}

#[test]
fn the_bus_has_a_bridge_and_31_places() {
    let machine = machine();
    let mut root = machine.root.lock().unwrap();
    for n in 2..SLOTS {
        assert_eq!(root.insert(DeviceId::new(format!("d{n}")), function(0x8000_0000)), Ok(n));
    }
    assert_eq!(root.insert(DeviceId::new("x"), function(0)), Err(SlotError::Full));
}
