use super::*;
use crate::snapshot::Stateful;
use crate::testing::{
    Buffer, Conformance, GuestDriver, STUB_FEATURES, StubDesk, conformance, ram, register,
};
use crate::virtio::feature;

fn live() -> (GuestDriver, StubDesk) {
    let desk = StubDesk::new();
    let mut driver = GuestDriver::new(desk.device());
    driver.initialize();
    (driver, desk)
}

#[test]
fn a_device_that_does_nothing_conforms() {
    conformance(|_| StubDesk::new().device());
}

#[test]
#[should_panic(expected = "did nothing")]
fn conformance_asks_for_the_exercise() {
    Conformance::new(|_| StubDesk::new().device()).exercise(|_| panic!("did nothing")).run();
}

#[test]
fn the_registers_say_what_the_device_is() {
    let mut driver = GuestDriver::new(StubDesk::new().device());
    assert_eq!(driver.read(register::DEVICE_ID), 3);
    assert_eq!(driver.read(register::VENDOR_ID).to_le_bytes(), *b"CUBE");
    assert_eq!(driver.offered(), STUB_FEATURES | feature::COMMON);
}

#[test]
fn used_buffers_and_configuration_changes_are_told_apart() {
    let (mut driver, desk) = live();
    driver.add(0, &[Buffer::writable(crate::memory::GuestAddress(0x40_0000), 16)]);
    desk.with_queue(0, |queue| {
        let chain = queue.pop().unwrap().unwrap();
        queue.complete(&chain, 0).unwrap();
        queue.notify().unwrap();
    });
    assert_eq!(driver.read(register::INTERRUPT_STATUS), USED_BUFFER);
    desk.notifier().config_changed();
    assert_eq!(driver.read(register::INTERRUPT_STATUS), USED_BUFFER | CONFIG_CHANGE);
    driver.write(register::INTERRUPT_ACK, USED_BUFFER).unwrap();
    assert_eq!(driver.read(register::INTERRUPT_STATUS), CONFIG_CHANGE);
    driver.write(register::INTERRUPT_ACK, u32::MAX).unwrap();
    assert_eq!(driver.read(register::INTERRUPT_STATUS), 0);
    assert_eq!(driver.irq().count(), 2);
}

#[test]
fn the_generation_changes_with_the_configuration() {
    let (mut driver, desk) = live();
    let before = driver.read(register::CONFIG_GENERATION);
    desk.notifier().config_changed();
    assert_ne!(driver.read(register::CONFIG_GENERATION), before);
}

#[test]
fn a_wish_to_be_reset_interrupts_once() {
    let (mut driver, desk) = live();
    desk.notifier().needs_reset();
    desk.notifier().needs_reset();
    assert!(driver.needs_reset());
    assert_eq!(driver.irq().count(), 1);
    driver.reset();
    assert!(!driver.needs_reset());
}

#[test]
fn there_is_one_doorbell_per_queue() {
    let (mut driver, desk) = live();
    let doorbells = driver.transport().doorbells().to_vec();
    assert_eq!(doorbells.iter().map(|bell| bell.queue.0).collect::<Vec<_>>(), [0, 1]);
    doorbells[1].event.signal();
    assert_eq!(desk.with_queue(1, |queue| queue.kick().clear()), 1);
    assert_eq!(desk.with_queue(0, |queue| queue.kick().clear()), 0);
}

#[test]
fn selectors_and_pending_interrupts_are_saved() {
    let (mut driver, desk) = live();
    driver.write(register::QUEUE_SELECT, 1).unwrap();
    driver.write(register::DEVICE_FEATURES_SELECT, 1).unwrap();
    desk.notifier().config_changed();
    driver.pause();
    let record = driver.save();
    driver.replace(StubDesk::new().device(), record).unwrap();
    assert_eq!(driver.read(register::QUEUE_SIZE_MAX), 16);
    assert_eq!(driver.read(register::DEVICE_FEATURES), 1);
    assert_eq!(driver.read(register::INTERRUPT_STATUS), CONFIG_CHANGE);
}

#[test]
fn an_interrupt_that_does_not_exist_is_refused() {
    let interrupt = Interrupt::none();
    let fresh = || {
        let id = DeviceId::new("stub");
        MmioTransport::new(id, StubDesk::new().device(), ram(), &interrupt).unwrap()
    };
    let state = fresh().save().unwrap();
    let mut other = fresh();
    let before = other.save_record().unwrap();
    assert!(other.restore(MmioState { interrupt_status: 4, ..state }).is_err());
    assert_eq!(other.save_record().unwrap(), before);
}
