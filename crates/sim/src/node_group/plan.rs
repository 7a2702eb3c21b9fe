//! Derives a plan from a setting and a seed.

use super::{GroupAction, GroupRunConfig, PlanDistribution, pairs};
use crate::random::Random;
use crate::time::Time;

/// The probability of an action that accompanies a request, and the action.
pub(crate) type AccompanyingAction = (f64, fn(u64) -> GroupAction);

/// Draws a config from a separate random stream, including its specific part. The actions in `with_requests` may
/// accompany each request.
pub(crate) fn draw_run_config<K>(
    setting: &PlanDistribution,
    seed: u64,
    with_requests: &[AccompanyingAction],
    draw_specific: impl FnOnce(&mut Random, usize) -> K,
) -> GroupRunConfig<K> {
    // Use a random stream other than the world's.
    let mut random = Random::new(seed ^ 0x5eed_5eed_5eed_5eed);
    let nodes = setting.nodes.draw(&mut random);
    let (holder, flows) = (random.below(nodes), setting.flows.draw(&mut random));
    let (hostile, failing) = (setting.faults.hostile, setting.faults.failing);
    let (hostile, failing) = (random.chance(hostile), random.chance(failing));
    let specific = draw_specific(&mut random, nodes);
    let mut planner = Planner {
        setting,
        nodes,
        random,
        plan: Vec::new(),
    };
    for _ in 0..setting.requests.draw(&mut planner.random) {
        planner.request(with_requests);
    }
    let mut plan = planner.plan;
    plan.sort_by_key(|(at, _)| *at);
    GroupRunConfig {
        nodes,
        holder,
        flows,
        hostile,
        failing,
        faults: setting.faults,
        plan,
        faults_end: setting.runtime,
        idle_deadline: setting.idle_deadline,
        specific,
    }
}

struct Planner<'a> {
    setting: &'a PlanDistribution,
    nodes: usize,
    random: Random,
    plan: Vec<(Time, GroupAction)>,
}

impl Planner<'_> {
    /// Adds a request, and the faults near it, so that most faults occur during a move.
    fn request(&mut self, with_requests: &[AccompanyingAction]) {
        let setting = self.setting;
        let at = self.random_time_within(Time::ZERO, setting.runtime);
        let draw = self.random.number();
        self.plan.push((at, GroupAction::Request { draw }));
        if self.random.chance(setting.crash) {
            let node = self.random.below(self.nodes);
            let ends = Time::from_secs_f64(0.7);
            self.add_fault(
                at,
                GroupAction::Crash(node),
                GroupAction::Restart(node),
                ends,
            );
        }
        if self.random.chance(setting.cut) {
            let pairs = pairs(self.nodes);
            let (a, b) = pairs[self.random.below(pairs.len())];
            let ends = Time::from_secs_f64(1.5);
            self.add_fault(at, GroupAction::Cut(a, b), GroupAction::Mend(a, b), ends);
        }
        self.add_action_soon(at, setting.close, |draw| GroupAction::Close { draw });
        for (chance, action) in with_requests {
            self.add_action_soon(at, *chance, *action);
        }
        for _ in 0..5 {
            self.add_action_soon(at, 1.0, |_| GroupAction::Serve);
            self.add_action_soon(at, setting.open, |draw| GroupAction::Open { draw });
        }
    }

    fn add_fault(&mut self, at: Time, begins: GroupAction, ends: GroupAction, within: Time) {
        let begin = self.random_time_within(at, self.setting.action_delay_max);
        let end = self.random_time_within(begin, within);
        self.plan.push((begin, begins));
        self.plan.push((end, ends));
    }

    fn add_action_soon(&mut self, at: Time, chance: f64, action: impl Fn(u64) -> GroupAction) {
        if self.random.chance(chance) {
            let at = self.random_time_within(at, self.setting.action_delay_max);
            let draw = self.random.number();
            self.plan.push((at, action(draw)));
        }
    }

    /// Returns a random time up to `time` after `from`, but not after the end of all faults.
    fn random_time_within(&mut self, from: Time, time: Time) -> Time {
        let at = from + Time(self.random.between(0, time.0.max(1)));
        at.min(self.setting.runtime)
    }
}
