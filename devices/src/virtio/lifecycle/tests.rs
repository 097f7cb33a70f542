use super::*;
use crate::snapshot::{RestoreError, Stateful};
use crate::testing::{Call, GuestDriver, IrqLog, StubDesk, ram};

fn live() -> (GuestDriver, StubDesk) {
    let desk = StubDesk::new();
    let mut driver = GuestDriver::new(desk.device());
    driver.initialize();
    assert_eq!(desk.calls(), [Call::Start(2)]);
    (driver, desk)
}

/// A device without a transport, and the state it would be saved with.
fn lifecycle(desk: &StubDesk) -> Lifecycle {
    let irq = IrqLog::new();
    let lines =
        || QueueLines { kick: crate::event::Event::new().unwrap(), interrupt: irq.interrupt() };
    let notifier = Notifier::new(irq.interrupt());
    let lines = vec![lines(), lines()];
    Lifecycle::new(DeviceId::new("stub"), desk.device(), ram(), notifier, lines).unwrap()
}

/// The state of a device that was paused while live.
fn parked_state() -> LifecycleState {
    let (mut driver, _desk) = live();
    driver.pause();
    driver.transport().lifecycle().save().unwrap()
}

#[test]
fn a_life_is_start_stop_reset() {
    let (mut driver, desk) = live();
    driver.pause();
    driver.resume();
    driver.reset();
    assert_eq!(desk.calls(), [Call::Stop, Call::Start(2), Call::Stop, Call::Reset]);
    driver.initialize();
    assert_eq!(desk.calls(), [Call::Start(2)]);
}

#[test]
fn pause_and_resume_of_an_idle_device_do_nothing() {
    let desk = StubDesk::new();
    let mut driver = GuestDriver::new(desk.device());
    driver.pause();
    driver.resume();
    assert_eq!(desk.calls(), []);
}

#[test]
fn only_queues_that_are_ready_are_given_to_the_device() {
    let desk = StubDesk::new();
    let mut driver = GuestDriver::new(desk.device());
    assert!(driver.negotiate(feature::VERSION_1));
    driver.driver_ok();
    assert_eq!(desk.calls(), [Call::Start(0)]);
}

#[test]
fn a_device_that_cannot_start_wants_a_reset() {
    let desk = StubDesk::new();
    desk.break_down();
    let mut driver = GuestDriver::new(desk.device());
    assert!(driver.negotiate(feature::VERSION_1));
    driver.set_up_queues();
    driver.driver_ok();
    assert!(driver.needs_reset());
    driver.wait_interrupt(2);
    // It is not live: nothing to stop, nothing to save but the wish.
    driver.pause();
    assert_eq!(desk.calls(), [Call::Start(2)]);
    let record = driver.save();
    driver.replace(desk.device(), record).unwrap();
    assert!(driver.needs_reset());
}

#[test]
fn a_driver_that_gives_up_stops_the_device() {
    let (mut driver, desk) = live();
    let failed = u32::from(driver.status() | status::FAILED);
    driver.write(crate::testing::register::STATUS, failed).unwrap();
    assert_eq!(desk.calls(), [Call::Stop]);
}

#[test]
fn a_resume_nudges_every_queue_once() {
    let (mut driver, desk) = live();
    driver.pause();
    driver.irq().take();
    driver.resume();
    assert_eq!(driver.irq().take(), 2);
    for queue in 0..2 {
        assert_eq!(desk.with_queue(queue, |queue| queue.kick().clear()), 1);
    }
}

#[test]
fn notifications_reach_a_live_device_only() {
    let (mut driver, desk) = live();
    driver.notify(1);
    assert_eq!(desk.with_queue(1, |queue| queue.kick().clear()), 1);
    driver.notify(2);
    driver.pause();
    driver.notify(0);
    driver.notify(1);
    driver.reset();
    driver.initialize();
    for queue in 0..2 {
        assert_eq!(desk.with_queue(queue, |queue| queue.kick().clear()), 0);
    }
}

#[test]
fn a_reset_takes_back_notifications_that_nobody_saw() {
    let (mut driver, desk) = live();
    driver.kick(0);
    driver.reset();
    driver.initialize();
    assert_eq!(desk.with_queue(0, |queue| queue.kick().clear()), 0);
}

#[test]
fn the_configuration_space_is_written_once_there_is_a_driver() {
    let (mut driver, desk) = live();
    driver.transport().lifecycle().write_config(7, b"SPACE").unwrap();
    assert_eq!(driver.config(0, 12), b"config SPACE");
    driver.pause();
    let record = driver.save();
    driver.replace(desk.device(), record).unwrap();
    assert_eq!(driver.config(0, 12), b"config SPACE");
}

#[test]
fn a_parked_state_makes_a_fresh_device_parked() {
    let desk = StubDesk::new();
    let mut fresh = lifecycle(&desk);
    let state = parked_state();
    fresh.restore(state.clone()).unwrap();
    assert_eq!(fresh.save().unwrap(), state);
    assert_eq!(desk.calls(), []);
    assert!(matches!(fresh.restore(state), Err(RestoreError::Running(_))));
    fresh.resume();
    assert_eq!(desk.calls(), [Call::Start(2)]);
}

fn refused(change: impl FnOnce(&mut LifecycleState)) {
    let mut state = parked_state();
    change(&mut state);
    let mut fresh = lifecycle(&StubDesk::new());
    let before = fresh.save().unwrap();
    assert!(fresh.restore(state).is_err());
    assert_eq!(fresh.save().unwrap(), before, "a refused state has changed something");
}

#[test]
fn states_that_cannot_be_are_refused_and_change_nothing() {
    refused(|state| state.driver_features |= 1 << 40);
    refused(|state| state.driver_features &= !feature::VERSION_1);
    refused(|state| state.status |= 0x10);
    refused(|state| state.status |= status::NEEDS_RESET);
    refused(|state| state.status |= status::FAILED);
    refused(|state| state.status &= !status::FEATURES_OK);
    refused(|state| state.status &= !status::DRIVER_OK);
    refused(|state| state.status &= !status::DRIVER);
    refused(|state| state.parked = false);
    refused(|state| state.queues.truncate(1));
    refused(|state| state.queues.clear());
    refused(|state| state.queues.swap(0, 1));
    refused(|state| state.queues[1].ring.size = 32);
    refused(|state| state.queues[1].ring.size = 0);
    refused(|state| state.queues[1].ring.used_ring = 6);
    refused(|state| state.queues[1].ring.used_ring = 0x7fff_ffff_0000);
    refused(|state| state.queues[1].ring.avail_ring = crate::testing::HOLE.0);
    refused(|state| state.device.kind = "other".to_owned());
    refused(|state| state.device.version += 1);
    refused(|state| state.device.state = ciborium::Value::Null);
}

#[test]
fn a_failed_device_comes_back_failed() {
    let (mut driver, desk) = live();
    let failed = driver.status() | status::FAILED;
    driver.write(crate::testing::register::STATUS, failed.into()).unwrap();
    let record = driver.transport().save_record().unwrap();
    driver.replace(desk.device(), record).unwrap();
    assert_eq!(driver.status(), failed);
    driver.resume();
    desk.calls();
    driver.reset();
    driver.initialize();
    assert_eq!(desk.calls(), [Call::Reset, Call::Start(2)]);
}
