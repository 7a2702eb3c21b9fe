//! Tests of conductors.

use crate::{assert_bugs_detected, assert_deterministic, assert_seeds};
use holdfast_sim::conductor::{
    BalancePolicies, BalanceTimes, ChangingLoad, ConductorBug, ConductorFrameRates, DEFAULT,
    PolicyEffect, PolicyRun, draw_run_config, measure_balance_times, measure_conductor_frame_rates,
    measure_policy_effect, shrink, try_run,
};
use holdfast_sim::node_group::GroupRunOutcome;
use holdfast_sim::{Violation, seeds};

common_simulation_tests!(ConductorBug, seeds_per_bug: 400);

/// Kinds of events that the runs must cover.
const EXPECTED_COUNTS: [&str; 21] = [
    "balanced",
    "drained",
    "moved",
    "kept",
    "move outlives the donor's daemon",
    "crash at Offered",
    "crash at Accepted",
    "crash at Begun",
    "crash at BeginReceived",
    "crash at MoveEnded",
    "crash at EndedReceived",
    "declined: Busy",
    "declined: CalmingDown",
    "declined: NoMemory",
    "outcome: Unanswered",
    "no beneficial move",
    "drain ended",
    "guest's frame",
    "load message comes late",
    "all nodes are overloaded",
    "loads are even",
];

/// Most seeds of a run: one simulates up to half an hour of a group, which takes much longer than a seed of the other
/// machines. So many seeds cover all events.
const SEEDS_MAX: usize = 500;

#[test]
fn loads_become_even_and_no_process_is_lost() {
    let mut seeds = seeds::from_environment(0, 150);
    seeds.truncate(SEEDS_MAX);
    assert_seeds(
        &seeds,
        SEEDS_MAX,
        |seed| run(seed, None),
        |seed| shrink(&DEFAULT, seed, None),
        &EXPECTED_COUNTS,
    );
}

#[test]
fn loads_are_even_within_twice_the_time_of_a_central_planner() {
    for (nodes, processes_per_node) in [(10, 10), (20, 20), (40, 5)] {
        let times: BalanceTimes = measure_balance_times(nodes, processes_per_node, 1)
            .unwrap_or_else(|violation| panic!("{nodes} nodes: {violation}"));
        eprintln!("{nodes} nodes: {times:?}");
        assert!(
            times.conductors.as_secs_f64() <= 2.0 * times.planner.as_secs_f64(),
            "{nodes} nodes: {times:?}"
        );
        assert!(times.moves_of_one_max <= 2, "{times:?}");
    }
}

/// Returns the effects of no balancing, of the paper's policies, of the defaults and of the central planner on 10 nodes.
fn policy_effects(load: ChangingLoad, processes_per_node: usize) -> [PolicyEffect; 4] {
    let run = |policies| PolicyRun {
        nodes: 10,
        processes_per_node,
        load,
        policies,
    };
    let effect = |run: &PolicyRun| -> PolicyEffect {
        let effect = measure_policy_effect(run, 1);
        effect.unwrap_or_else(|violation| panic!("{run:?}: {violation}"))
    };
    let all = [
        BalancePolicies::Off,
        BalancePolicies::Paper,
        BalancePolicies::Default,
        BalancePolicies::Central,
    ];
    let effects = seeds::run_all(&all.map(run), effect, |_| ());
    eprintln!("{load:?}, {processes_per_node} processes a node, {all:?}: {effects:#?}");
    [effects[0], effects[1], effects[2], effects[3]]
}

/// Small processes are the paper's best case: a donor that predicts nothing does little harm, and stops at a load 8 points
/// above the average. The defaults go on to 3 points above, so they move more processes, about twice as many, and the
/// loads are nearer to each other. Bursts of 20 s make most of the rest, and are over before a move helps.
#[test]
fn changing_loads_of_small_processes_are_evened_out_better_than_by_the_policies_of_the_paper() {
    let [off, paper, default, _] = policy_effects(ChangingLoad::Mixed, 20);
    assert_eq!(off.moves, 0);
    assert!(
        default.excess_mean < 0.95 * paper.excess_mean,
        "{paper:?} {default:?}"
    );
    assert!(
        default.excess_mean < 0.8 * off.excess_mean,
        "{off:?} {default:?}"
    );
    assert_eq!(default.undone, 0);
}

/// Large processes with bursts cannot be evened out: what helps during a burst is wrong after the burst. The paper's policies
/// follow each burst, and undo many of their moves. The defaults make few moves, and undo none. The loads do not come
/// nearer to each other: a process that moved in a burst rests at its new node, so loads are less even than without any
/// move, and less than by the paper's policies. With 10 processes a node the defaults move even more processes than the
/// paper's policies (199 and 158 in the first measurement), to less effect (11.5 and 9.3 points; 12.6 without moves).
#[test]
fn bursts_of_large_processes_cause_few_moves_unlike_with_the_policies_of_the_paper() {
    let [_, paper, default, _] = policy_effects(ChangingLoad::Mixed, 5);
    assert!(
        4 * default.moves < paper.moves && paper.undone >= 10,
        "{paper:?} {default:?}"
    );
    assert_eq!(default.undone, 0);
}

#[test]
fn frames_per_second_and_node_do_not_grow_with_the_group() {
    let rates = |nodes: &usize| -> ConductorFrameRates {
        let rates = measure_conductor_frame_rates(*nodes, 1);
        rates.unwrap_or_else(|violation| panic!("{violation:?}"))
    };
    let all = seeds::run_all(&[10, 1_000], rates, |_| ());
    let (few, many) = (all[0], all[1]);
    eprintln!("10 nodes: {few:?}\n1,000 nodes: {many:?}");
    assert!((many.sent - few.sent).abs() <= 0.2, "{few:?} {many:?}");
    assert!(
        (many.received - few.received).abs() <= 0.2,
        "{few:?} {many:?}"
    );
    assert!(many.sent_max <= 4.0, "{many:?}");
    // Receivers are drawn at random, and the busiest of more nodes is a rarer one.
    assert!(many.received_max <= 2.0 * many.received, "{many:?}");
}
