//! One measurement: packets for some time, the packets that arrived, and the processor time of the contact node's
//! thread.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use holdfast_bpf::traffic::{SinkCountReader, SinkCounts, TrafficGenerator, TrafficPlan};
use nix::time::clock_getcpuclockid;
use nix::unistd::Pid;

use super::steer_group::{FIRST_CLIENT_ADDRESS, PORT, SERVICE_ADDRESS};
use super::test_network::{GENERATOR_CPU, TestNetwork, link_address, pin_thread};

/// Time under traffic before a measurement begins.
const WARM_UP: Duration = Duration::from_millis(30);
/// One packet in this many is checked during a measurement.
const SAMPLE_INTERVAL: u32 = 64;
/// Most passes over all flows until a packet of each has passed the full queues.
const PASSES_MAX: u32 = 4000;
/// Packets of one system call, if there are fewer flows.
const BURST_PACKETS: u32 = 1 << 18;

/// Interface of the contact node at which the packets arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForwardingPath {
    /// The interface of the kernel's IP forwarding.
    KernelRouting,
    /// The interface of the steering program.
    SteeringProgram,
}

/// Result of one measurement.
#[derive(Clone, Copy, Debug)]
pub struct ForwardingRate {
    /// Packets per second that arrived at the owners.
    pub pps: f64,
    /// Processor time of the contact node's thread per packet, nanoseconds, including the owner's receipt.
    pub cpu_ns: f64,
}

/// The generator and the owners' sinks.
pub struct RateMeter {
    traffic: TrafficGenerator,
    counts: SinkCountReader,
    paths: [(Pid, u32); 2],
    /// Packets per send call; raised until the call outlasts a measurement.
    packets: u32,
    round: u32,
}

impl RateMeter {
    /// Attaches the sinks and gives the contact node's interfaces their threads.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn new(place: &TestNetwork) -> Result<Self> {
        let mut traffic = TrafficGenerator::load()?;
        for (owner, host, device, xdp) in [
            (0, "o0", "plain", false),
            (0, "o0", "link", true),
            (1, "o1", "link", true),
            (0, "o0", "encap", false),
            (1, "o1", "encap", false),
        ] {
            let ifindex = place.ifindex(host, device)?;
            place.run_in_namespace(host, || Ok(traffic.attach_sink(ifindex, owner, xdp)?))?;
        }
        let kernel = (
            place.enable_napi_thread("by-kernel")?,
            place.ifindex("g", "to-kernel")?,
        );
        let steer = (
            place.enable_napi_thread("by-steer")?,
            place.ifindex("g", "to-steer")?,
        );
        let counts = traffic.counts()?;
        Ok(Self {
            traffic,
            counts,
            paths: [kernel, steer],
            packets: 1 << 20,
            round: 0,
        })
    }

    fn set_plan(&mut self, way: ForwardingPath, flows: u32, sample_mask: u32) -> Result<()> {
        self.round += 1;
        // The generator's two interface pairs are alike; of the owners, the kernel's route reaches owner 0 alone.
        let pair = u8::from(way == ForwardingPath::SteeringProgram);
        let plan = TrafficPlan {
            flows,
            ifindex: self.paths[way as usize].1,
            service: SERVICE_ADDRESS.octets(),
            client: FIRST_CLIENT_ADDRESS.octets(),
            port: PORT.to_be_bytes(),
            next_hop_link: link_address(pair, 1),
            own_link: link_address(pair, 0),
            owners: owner_count(way, flows),
            sample_mask,
            round: self.round,
        };
        Ok(self.traffic.set_plan(&plan)?)
    }

    /// Sends at the highest rate, and measures for `duration` in the middle of it.
    ///
    /// # Errors
    /// The kernel refuses, no packet arrived, or a packet was wrong.
    pub fn measure(
        &mut self,
        place: &TestNetwork,
        way: ForwardingPath,
        flows: u32,
        duration: Duration,
    ) -> Result<ForwardingRate> {
        loop {
            if let Some(rate) = self.attempt(place, way, flows, duration)? {
                return Ok(rate);
            }
            // All packets were sent before the end of the measurement.
            self.packets = self.packets.saturating_mul(2);
        }
    }

    fn attempt(
        &mut self,
        place: &TestNetwork,
        way: ForwardingPath,
        flows: u32,
        duration: Duration,
    ) -> Result<Option<ForwardingRate>> {
        self.set_plan(way, flows, SAMPLE_INTERVAL - 1)?;
        let start = sum_counters(&self.counts.read()?).packets;
        let (traffic, packets) = (&mut self.traffic, self.packets);
        let sending = AtomicBool::new(true);
        let stretch = std::thread::scope(|scope| {
            let sender = scope.spawn(|| {
                let sent = place.run_in_namespace("g", || {
                    pin_thread(Pid::from_raw(0), GENERATOR_CPU)?;
                    Ok(traffic.send(packets)?)
                });
                sending.store(false, Ordering::Release);
                sent
            });
            let sample = || CounterSample::take(&self.counts, self.paths[way as usize].0);
            // The send call first prepares its packets, and the kernel waits for quiescence meanwhile.
            while sending.load(Ordering::Acquire)
                && sum_counters(&self.counts.read()?).packets == start
            {
                std::thread::sleep(Duration::from_millis(1));
            }
            std::thread::sleep(WARM_UP);
            let before = sample()?;
            std::thread::sleep(duration);
            let after = sample()?;
            let is_complete = sending.load(Ordering::Acquire);
            sender
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            Ok::<_, anyhow::Error>(is_complete.then_some((before, after)))
        })?;
        self.wait_until_idle()?;
        let seen = sum_counters(&self.counts.read()?);
        ensure!(
            wrong_packets(&seen) == 0,
            "the received packets differ from the sent ones: {seen:?}"
        );
        stretch
            .map(|(before, after)| after.rate_since(&before))
            .transpose()
    }

    /// Sends until a packet of every flow has arrived, and checks all that arrive: each at its owner, unchanged.
    /// Returns the number of packets.
    ///
    /// # Errors
    /// A packet is wrong, or a flow does not arrive.
    pub fn verify(&mut self, place: &TestNetwork, way: ForwardingPath, flows: u32) -> Result<u64> {
        self.set_plan(way, flows, 0)?;
        let before = self.counts.read()?;
        let mut passes = 0;
        while sum_counters(&self.counts.read()?).flows - sum_counters(&before).flows
            < u64::from(flows)
        {
            ensure!(
                passes < PASSES_MAX,
                "not every flow arrived: {:?}",
                self.counts.read()?
            );
            let traffic = &mut self.traffic;
            let packets = flows.max(BURST_PACKETS);
            place.run_in_namespace("g", || Ok(traffic.send(packets)?))?;
            self.wait_until_idle()?;
            passes += packets / flows;
        }
        let after = self.counts.read()?;
        let seen = sum_counters(&after);
        ensure!(
            wrong_packets(&seen) == 0,
            "the received packets differ from the sent ones: {after:?}"
        );
        let packets = seen.packets - sum_counters(&before).packets;
        ensure!(
            seen.checked - sum_counters(&before).checked == packets,
            "not every packet was checked"
        );
        let second = after[1].flows - before[1].flows;
        let expected = if owner_count(way, flows) == 2 {
            u64::from(flows / 2)
        } else {
            0
        };
        ensure!(
            second == expected,
            "{second} flows at the second owner, {expected} were expected"
        );
        Ok(packets)
    }

    fn wait_until_idle(&self) -> Result<()> {
        let mut before = sum_counters(&self.counts.read()?).packets;
        loop {
            std::thread::sleep(Duration::from_millis(5));
            let now = sum_counters(&self.counts.read()?).packets;
            if now == before {
                return Ok(());
            }
            before = now;
        }
    }
}

/// Counters and processor time at one moment.
struct CounterSample {
    at: Instant,
    counters: SinkCounts,
    cpu: Duration,
}

impl CounterSample {
    fn take(counts: &SinkCountReader, thread: Pid) -> Result<Self> {
        let cpu = Duration::from(clock_getcpuclockid(thread)?.now()?);
        Ok(Self {
            at: Instant::now(),
            counters: sum_counters(&counts.read()?),
            cpu,
        })
    }

    fn rate_since(&self, before: &Self) -> Result<ForwardingRate> {
        let packets = self.counters.packets - before.counters.packets;
        ensure!(
            packets > 0 && self.counters.checked > before.counters.checked,
            "nothing arrived at the owners"
        );
        Ok(ForwardingRate {
            pps: packets as f64 / (self.at - before.at).as_secs_f64(),
            cpu_ns: (self.cpu - before.cpu).as_nanos() as f64 / packets as f64,
        })
    }
}

/// Returns the number of owners that share the flows.
pub fn owner_count(way: ForwardingPath, flows: u32) -> u16 {
    if way == ForwardingPath::SteeringProgram && flows > 1 {
        2
    } else {
        1
    }
}

fn sum_counters(seen: &[SinkCounts; 2]) -> SinkCounts {
    let [a, b] = seen;
    SinkCounts {
        packets: a.packets + b.packets,
        checked: a.checked + b.checked,
        flows: a.flows + b.flows,
        wrong_flow: a.wrong_flow + b.wrong_flow,
        wrong_owner: a.wrong_owner + b.wrong_owner,
        wrong_content: a.wrong_content + b.wrong_content,
    }
}

fn wrong_packets(seen: &SinkCounts) -> u64 {
    seen.wrong_flow + seen.wrong_owner + seen.wrong_content
}
