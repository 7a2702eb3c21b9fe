use super::*;
use holdfast_proto::registrar::{Allow, LifeUnit, TakeoverRace};

fn parse(text: &str) -> Result<RegistrarConfig, ConfigError> {
    RegistrarConfig::parse(Path::new("registrar.toml"), text)
}

fn refused(text: &str) -> String {
    parse(text).expect_err(text).to_string()
}

#[test]
fn an_empty_file_is_the_default() {
    let (empty, none) = (parse("").unwrap(), RegistrarConfig::load(None).unwrap());
    assert_eq!(format!("{empty:?}"), format!("{none:?}"));
    assert_eq!((none.asap_port, none.enrp_port), (3863, 9901));
    assert_eq!(none.encapsulation, Some(9899));
}

#[test]
fn what_is_written_is_heeded() {
    let text = r#"
[registrar]
id = 0x1234
listen = ["10.0.0.1", "10.1.0.1"]
asap_port = 0
raw = false
encapsulation_port = 0
one_send = false
pause_us = 250
update_delay_ms = 3
refresh_delay_ms = 70
life_unit = "seconds"
takeover_race = "higher_id"
heartbeat_cycle_ms = 250
last_heard_max_ms = 1000
[[peer]]
addresses = ["10.0.0.2"]
encapsulation_port = 7000
[access]
register = ["10.0.0.0/8"]
[limits]
elements = 7
[multicast]
announce_ms = 1000
[sctp]
rto_max_ms = 600
init_retransmissions = 2
"#;
    let config = parse(text).unwrap();
    assert_eq!(config.id, Some(0x1234));
    assert_eq!((config.listen.len(), config.asap_port), (2, 0));
    assert_eq!((config.raw, config.encapsulation), (false, Some(0)));
    assert!(!config.one_send && RegistrarConfig::default().one_send);
    assert_eq!(config.pause, Duration::from_micros(250));
    assert_eq!(config.update_delay, Duration::from_millis(3));
    let settings = &config.settings;
    assert_eq!(settings.life_unit, LifeUnit::Seconds);
    assert_eq!(settings.takeover_race, TakeoverRace::HigherId);
    assert_eq!(settings.refresh_delay, Duration::from_millis(70));
    assert_eq!(settings.heartbeat_cycle, Duration::from_millis(250));
    assert_eq!(settings.last_heard_max, Duration::from_secs(1));
    assert_eq!(settings.limits.elements, 7);
    assert_eq!(settings.announce_cycle, Some(Duration::from_secs(1)));
    assert!(
        !settings
            .access
            .register
            .contains("11.0.0.1".parse().unwrap())
    );
    assert_eq!(settings.access.resolve, Allow::Everybody);
    assert_eq!(config.failure.rto_max, Duration::from_millis(600));
    assert_eq!(config.failure.init_retransmissions, 2);
    let peer = "10.0.0.2:9901".parse().unwrap();
    assert_eq!(config.encapsulations().get(&peer), Some(&7000));
}

#[test]
fn tcp_and_tls_are_off_unless_configured() {
    let none = parse("").unwrap().streams;
    assert!(!none.is_on());
    let tls = "[tls]\nca = \"ca.pem\"\ncert = \"/etc/r1.pem\"\nkey = \"r1.key\"\n";
    let streams = parse(tls).unwrap().streams;
    assert_eq!((streams.tcp_port, streams.tls_port), (None, 3864));
    assert!(streams.is_on());
    let names = "[access]\nregister = [\"tls:web\"]\n";
    assert!(parse(&format!("{tls}{names}")).is_ok());
    assert!(refused(names).contains("there is no TLS"));
    let registrar = format!("{tls}[access]\nregistrar = [\"tls:r2\"]\n");
    assert!(refused(&registrar).contains("access.registrar"));
    let same = format!("{tls}[tcp]\nport = 3864\n");
    assert!(refused(&same).contains("the same"));
    assert!(refused("[tcp]\nhandshake_ms = 0\n").contains("handshake_ms"));
}

#[test]
fn what_cannot_be_is_refused_and_named() {
    let prefix = refused("[access]\nregister = [\"10.0.0.0/33\"]\n");
    assert!(
        prefix.contains("registrar.toml:2: access.register"),
        "{prefix}"
    );
    assert!(refused("[registrar]\nlisen = []\n").contains("lisen"));
    assert!(refused("[registrar]\nlisten = []\n").contains("listen"));
    assert!(refused("[registrar]\nlisten = [\"10.0.0.1\", \"::1\"]\n").contains("listen"));
    assert!(refused("[registrar]\nraw = false\nencapsulation = false\n").contains("neither"));
    assert!(refused("[registrar]\nid = 0\n").contains("registrar.id"));
    assert!(refused("[registrar]\nlast_heard_max_ms = 10\n").contains("heartbeat"));
    assert!(refused("[sctp]\nrto_max_ms = 100\n").contains("[sctp]"));
    assert!(refused("[sctp]\npath_mtu = 100\n").contains("sctp.path_mtu"));
    assert!(refused("[limits]\nipv6_host_bits = 129\n").contains("ipv6_host_bits"));
    assert!(refused("[limits]\nmessages_per_second = 0\n").contains("messages_per_second"));
    assert!(refused("[[peer]]\naddresses = []\n").contains("peer"));
    assert!(refused("[multicast]\nenrp_group = \"10.0.0.1:9901\"\n").contains("group"));
}
