//! Tests of valid and invalid scenario texts.

use super::*;
use crate::{conductor, handoff, membership, migration, replication};

fn pools(scenario: Scenario) -> PoolScenario {
    match scenario.kind {
        SimulationKind::Pools(pools) => *pools,
        _ => panic!("no pools"),
    }
}

fn built_in(name: &str) -> Scenario {
    Scenario::built_in(name)
        .expect("it is there")
        .expect("it is right")
}

#[test]
fn built_in_scenarios_parse() {
    for (name, _) in BUILT_IN {
        let scenario = Scenario::built_in(name).unwrap();
        let scenario = scenario.unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(!scenario.about.is_empty(), "{name}");
        if let SimulationKind::Pools(pools) = scenario.kind {
            assert_eq!(pools.windows.len(), pools.config.windows.len());
        }
    }
    assert!(Scenario::built_in("other").is_none());
}

#[test]
fn scenario_text_sets_the_config() {
    let regions = pools(built_in("regions")).config;
    assert_eq!(regions.links[0][2], regions.links[2][0]);
    assert_eq!(regions.links[0][2].delay.mean_ms(), 300.0);
    assert_eq!(regions.links[1][2].delay.mean_ms(), 112.0);
    assert_eq!(regions.links[1][1].delay.mean_ms(), 10.0);
    assert_eq!(regions.initial_elements, Some(vec![5, 5, 5]));
    assert_eq!(regions.plan.len(), 8);
    // Equation 2: three users for each element, requests of a second, 60 %.
    let lans = pools(built_in("lans")).config;
    assert!((lans.workload.request_interval - 5.0).abs() < 1e-9);
}

#[test]
fn invalid_scenario_gives_a_specific_error() {
    let zone = "utilisation = 0.6\n[[zone]]\nname = \"a\"\nelements = 2\nusers = 1\n";
    let error = |text: &str| match Scenario::parse(&format!("{text}{zone}")) {
        Ok(_) => panic!("accepted as a scenario: {text}"),
        Err(error) => error.to_string(),
    };
    assert!(error("policy = \"BEST\"\n").contains("BEST"));
    assert!(error("polcy = \"LU\"\n").contains("polcy"));
    assert!(error("request_interval_s = 1\n").contains("either"));
    assert!(error("capacity = 0\n").contains("above 0"));
    let error = |text: &str| match Scenario::parse(&format!("{zone}{text}")) {
        Ok(_) => panic!("accepted as a scenario: {text}"),
        Err(error) => error.to_string(),
    };
    assert!(error("[[event]]\nat_s = 1\ncut = [\"a\", \"b\"]\n").contains("`b`"));
    let missing = "[[event]]\nat_s = 1\nkill = [{ zone = \"a\", element = 2 }]\n";
    assert!(error(missing).contains("none numbered 2"));
    assert!(Scenario::parse("utilisation = 0.6").is_err());
}
/// The built-in plain scenarios state the default values.
#[test]
fn plain_group_scenarios_state_the_defaults() {
    let group = |text: &str| match Scenario::parse(text).expect("it is right").kind {
        SimulationKind::Group(group) => group,
        _ => panic!("no group"),
    };
    let text = |wanted| {
        BUILT_IN
            .iter()
            .find(|(name, _)| *name == wanted)
            .expect("it is there")
            .1
    };
    let (setting, bug) = (handoff::DEFAULT, None);
    let plain = GroupScenario::Handoff { setting, bug };
    assert_eq!(group(text("handoff")), plain);
    assert_eq!(group("kind = \"handoff\""), plain);
    let (setting, bug) = (migration::DEFAULT, None);
    let plain = GroupScenario::Migration { setting, bug };
    assert_eq!(group(text("migration")), plain);
    assert_eq!(group("kind = \"migration\""), plain);
    let (setting, bug) = (Box::new(membership::DEFAULT), None);
    let plain = GroupScenario::Membership { setting, bug };
    assert_eq!(group(text("membership")), plain);
    assert_eq!(group("kind = \"membership\""), plain);
    let (setting, bug) = (Box::new(membership::WITH_STORE), None);
    let with_store = GroupScenario::Membership { setting, bug };
    assert_eq!(group(text("membership-store")), with_store);
    let (setting, bug) = (Box::new(conductor::DEFAULT), None);
    let plain = GroupScenario::Conductor { setting, bug };
    assert_eq!(group(text("conductor")), plain);
    assert_eq!(group("kind = \"conductor\""), plain);
    let (setting, bug) = (Box::new(replication::DEFAULT), None);
    let plain = GroupScenario::Replication { setting, bug };
    assert_eq!(group(text("replication")), plain);
    assert_eq!(group("kind = \"replication\""), plain);
}

#[test]
fn invalid_group_scenario_gives_a_specific_error() {
    let error =
        |kind: &str, text: &str| match Scenario::parse(&format!("kind = \"{kind}\"\n{text}")) {
            Ok(_) => panic!("accepted as a scenario: {text}"),
            Err(error) => error.to_string(),
        };
    assert!(error("handof", "").contains("handof"));
    assert!(error("handoff", "zone = []").contains("zone"));
    assert!(error("handoff", "processes = 2").contains("migrations"));
    assert!(error("handoff", "[with_request]\nkill = 0.1").contains("migrations"));
    assert!(error("handoff", "flows = 0").contains("1 to 1000"));
    assert!(error("migration", "processes = 1").contains("2 to 100"));
    assert!(error("migration", "nodes = [5, 3]").contains("2 to 64"));
    assert!(error("migration", "rest_s = 90").contains("rest_s"));
    assert!(error("migration", "[faults]\nlost = 1.5").contains("0 to 1"));
    assert!(error("migration", "[with_request]\ncopy = -1").contains("0 to 1"));
    assert!(error("pools", "nodes = 2").contains("nodes"));
    assert!(error("membership", "voters = 10").contains("1 to 9"));
    assert!(error("membership", "nodes = 3").contains("nodes"));
    assert!(error("membership", "lease_within_s = 90").contains("lease_within_s"));
    assert!(error("membership", "[incident]\ncrash = 2").contains("0 to 1"));
    assert!(error("conductor", "nodes = 1").contains("2 to 64"));
    assert!(error("conductor", "faults_end_s = 60").contains("faults_end_s"));
    assert!(error("conductor", "liar = 2").contains("0 to 1"));
    let sizes = "nodes = 10\nprocesses_per_node = 5\n";
    assert!(error("policies", &format!("{sizes}loads = [\"wild\"]")).contains("wild"));
    assert!(error("policies", "nodes = 1\nprocesses_per_node = 5\nloads = []").contains("2 to"));
    assert!(error("replication", "legs = 5").contains("1 to 4"));
    assert!(error("replication", "loss = 2").contains("0 to 1"));
    assert!(error("replication", "deadline_s = 1").contains("deadline_s"));
    assert!(error("replication", "[fault]\ncrash = 2").contains("crash"));
}
