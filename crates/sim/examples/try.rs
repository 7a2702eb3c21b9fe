use holdfast_sim::pools::*;
use holdfast_sim::*;
fn main() {
    let a: Vec<f64> = std::env::args()
        .skip(1)
        .map(|x| x.parse().unwrap())
        .collect();
    let (r, wan, dpf, ratio, inc) = (a[0], a[1], a[2], a[3], a[4]);
    let seeds = a.get(5).copied().unwrap_or(4.0) as u64;
    let per = a.get(6).copied().unwrap_or(10.0) as u32;
    let zones = vec![
        Zone {
            elements: per,
            users: (f64::from(per) * r) as u32
        };
        3
    ];
    let w = Workload::of_utilisation(1e6, 1e6 * ratio, r, 0.6);
    let choice = if dpf < 0.0 {
        Choice::LeastUsed
    } else {
        Choice::LeastUsedDpf(dpf)
    };
    let mut config = Config::new(zones, 10.0, wan, choice, w);
    config.load_per_request = inc;
    let start = std::time::Instant::now();
    let jobs: Vec<u64> = (0..seeds).collect();
    let outs = seeds::each(&jobs, |s| run(&config, *s), |_| ());
    let wall = start.elapsed().as_secs_f64();
    let est = |f: &dyn Fn(&Window) -> f64| {
        Estimate::of(&outs.iter().map(|o| f(&o.windows[0])).collect::<Vec<_>>())
    };
    let e = outs.iter().map(|o| o.events).sum::<u64>();
    let p = |n: &str, x: Estimate| println!("{n}: {:.4} +- {:.4}", x.mean, x.ci95.unwrap_or(0.0));
    p("speed", est(&|w| w.speed() / 1e6));
    p("speed of requests", est(&|w| w.speed_of_requests() / 1e6));
    p("handling", est(&|w| w.handling_mean_s()));
    p("queue", est(&|w| w.queuing_s / w.requests as f64));
    p("startup", est(&|w| w.startup_s / w.requests as f64));
    p("util", est(&|w| w.utilisation()));
    p("local", est(&|w| w.local_share()));
    p("requests", est(&|w| w.requests as f64));
    println!(
        "events {e} in {wall:.2}s {:.0}/s  digest {:x}",
        e as f64 / wall,
        outs[0].digest
    );
}
