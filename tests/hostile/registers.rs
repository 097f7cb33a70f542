//! Status, features, queue set-up and notifications, against every device over both transports.

use super::driver::{AVAIL, DESC, REGISTERS, Register, USED};
use super::machine::{Device, MEMORY, devices};
use super::on_both;
use super::script::Script;

/// For every device of both machines.
fn each(body: impl Fn(&mut Script, &Device)) {
    on_both(|script, kind| {
        for device in devices(kind) {
            body(script, &device);
            device.reset(script);
        }
    });
}

/// The status is what it was.
fn status(script: &mut Script, device: &Device, value: u64) {
    let (address, size) = device.register(Register::Status);
    script.check(size, address, value);
}

/// The device wants a reset.
fn broken(script: &mut Script, device: &Device) {
    let (address, size) = device.register(Register::Status);
    script.check_masked(size, address, 0x40, 0x40);
}

#[test]
fn h02_queue_sizes_that_cannot_be() {
    each(|script, device| {
        device.negotiate(script);
        for queue in 0..device.queues {
            device.set(script, Register::QueueSelect, queue);
            for size in [0, 3, 100, 0x7fff, 0x8000, 0xffff, 0x1_0001, 0xffff_ffff] {
                device.set(script, Register::QueueSize, size);
            }
        }
        status(script, device, 11);
    });
}

#[test]
fn h14_notifications_before_driver_ok_after_reset_and_of_unknown_queues() {
    each(|script, device| {
        let all = |script: &mut Script| {
            for queue in [0, 1, 2, 5, 63, 0x7ff] {
                device.notify(script, queue, 3);
            }
        };
        all(script);
        device.negotiate(script);
        all(script);
        device.initialize(script, 0);
        all(script);
        device.reset(script);
        all(script);
    });
}

#[test]
fn h15_a_storm_of_notifications_leaves_the_others_alone() {
    each(|script, device| {
        device.initialize(script, 0);
        for queue in 0..device.queues {
            device.notify(script, queue, 5000);
        }
    });
}

#[test]
fn h20_queues_that_do_not_exist() {
    each(|script, device| {
        device.negotiate(script);
        for queue in [device.queues, device.queues + 1, 0xff, 0xffff] {
            device.set_queue(script, queue, 8, [DESC, AVAIL, USED]);
            let (ready, size) = device.register(Register::QueueReady);
            script.check(size, ready, 0);
            let (ring, size) = device.register(Register::Ring(0, false));
            script.check(size, ring, 0);
        }
        status(script, device, 11);
    });
}

#[test]
fn h21_a_live_queue_does_not_change() {
    each(|script, device| {
        device.initialize(script, 0);
        device.set(script, Register::QueueSelect, 0);
        for register in REGISTERS {
            let fixed = !matches!(register, Register::Status | Register::QueueSelect);
            for value in [0, 1, 0x5000, 0xffff_ffff] {
                if fixed {
                    device.set(script, register, value);
                }
            }
        }
        device.set(script, Register::QueueSelect, 0);
        for (ring, value) in [(0, DESC), (1, AVAIL), (2, USED)] {
            let (address, size) = device.register(Register::Ring(ring, false));
            script.check(size, address, value);
        }
        status(script, device, 15);
    });
}

#[test]
fn h22_rings_that_are_nowhere() {
    let nowhere = [
        [!0xfff, AVAIL, USED],
        [DESC, 0xd000_0000, USED],
        [DESC, AVAIL, 0xc001_0000],
        [MEMORY - 16, AVAIL, USED],
        [DESC, AVAIL, MEMORY],
        [0x8000_0000_0000_0000, AVAIL, USED],
    ];
    each(|script, device| {
        for rings in nowhere {
            device.negotiate(script);
            device.set_queue(script, 0, 8, rings);
            device.set(script, Register::Status, 15);
            broken(script, device);
            device.notify(script, 0, 1);
            device.reset(script);
        }
        // Never set, and switched on and off.
        device.negotiate(script);
        for value in [1, 0, 1, 0, 1] {
            device.set(script, Register::QueueReady, value);
        }
        device.set(script, Register::Status, 15);
        device.notify(script, 0, 1);
    });
}

#[test]
fn h24_the_status_only_grows() {
    each(|script, device| {
        for (value, stays) in [(4, 0), (15, 0), (8, 0), (0x30, 0), (0x40, 0), (5, 0), (1, 1)] {
            device.set(script, Register::Status, value);
            status(script, device, stays);
        }
        device.initialize(script, 0);
        for value in [14, 13, 11, 7, 3, 0x7f, 0x4f, 15] {
            device.set(script, Register::Status, value);
            status(script, device, 15);
        }
        device.set(script, Register::Status, 0x8f);
        status(script, device, 0x8f);
        device.set(script, Register::Status, 15);
        status(script, device, 0x8f);
    });
}

#[test]
fn h27_a_hundred_resets_under_way() {
    each(|script, device| {
        script.repeat(100, |script| {
            device.initialize(script, 0);
            // Eight buffers of nothing, whatever the device makes of them.
            script.write(2, AVAIL + 2, 8);
            device.notify(script, 0, 1);
            device.reset(script);
        });
    });
}

#[test]
fn every_register_in_every_size_and_at_every_address() {
    each(|script, device| {
        let over = device.window()..device.window() + device.window_len();
        for size in [1, 2, 4, 8] {
            script.sweep_read(size, over.clone(), 1);
            for value in [u64::MAX, 0x8080_8080_8080_8080] {
                script.sweep_write(size, over.clone(), 1, value);
            }
        }
        device.reset(script);
        device.initialize(script, 0);
        for size in [1, 2, 4, 8] {
            script.sweep_write(size, over.clone(), 1, u64::MAX);
        }
    });
}

#[test]
fn the_rest_of_every_window() {
    each(|script, device| {
        let over = device.window() + 0x100..device.window() + 0x1000;
        script.sweep_read(4, over.clone(), 52).sweep_write(4, over.clone(), 52, u64::MAX);
        script.sweep_read(8, over.clone(), 60).sweep_write(2, over, 62, 0);
    });
}

#[test]
fn configuration_spaces_full_of_ones() {
    each(|script, device| {
        device.initialize(script, 0);
        let start = device.window() + if device.window_len() == 0x200 { 0x100 } else { 0x4000 };
        for size in [1, 2, 4, 8] {
            script.sweep_write(size, start..start + 80, 1, u64::MAX);
            script.sweep_read(size, start..start + 80, 1);
        }
    });
}
