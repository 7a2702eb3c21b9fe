//! A sample of `holdfast demo drain`: two nodes of a group are drained, rebooted and filled again, and no client sees an
//! error. Needs root, and the servers' packages, so `./x test-real` runs the test.
#![cfg(target_arch = "x86_64")]

use std::time::Duration;

use holdfast_bench::demo::drain::{DrainDemoSpec, DrainDisplay, run};

#[test]
#[ignore = "needs the packages of the group `drain` in scripts/setup.sh: ./x test-real"]
fn no_client_notices_that_two_nodes_are_drained_and_rebooted() {
    let spec = DrainDemoSpec {
        name: format!("drain-{}", std::process::id()),
        nodes_to_drain: 2,
        servers_per_kind: 2,
        control: Duration::from_secs(5),
        realtime: false,
        ..DrainDemoSpec::default()
    };
    let screen = DrainDisplay::default();
    let report =
        run(&spec, &|event| screen.show(event)).unwrap_or_else(|error| panic!("{error:#}"));
    eprintln!("{}", report.text());
    assert!(report.passed, "{:#?}", report.problems);
    let [first, second] = &report.nodes[..] else {
        panic!("{:#?}", report.nodes);
    };
    assert!(first.was_contact_node && !second.was_contact_node);
    for node in [first, second] {
        assert!(node.moved >= 2 && node.refilled >= 2, "{node:#?}");
        assert!(
            node.reboot_s.is_some() && node.freeze_ms_max.is_some(),
            "{node:#?}"
        );
    }
    assert_eq!(report.servers_left.values().sum::<usize>(), 8);
    assert_eq!(report.errors.count() + report.errors.wrong_bytes, 0);
}
