use super::*;

fn parse(text: &str) -> Result<PoolConfig, ConfigError> {
    PoolConfig::parse(Path::new("pool.toml"), text)
}

fn refused(text: &str) -> String {
    parse(text).expect_err(text).to_string()
}

#[test]
fn an_empty_file_is_the_default_and_knows_the_registrar_of_this_host() {
    let (empty, none) = (parse("").unwrap(), PoolConfig::load(None).unwrap());
    assert_eq!(format!("{empty:?}"), format!("{none:?}"));
    let local: SocketAddr = "127.0.0.1:3863".parse().unwrap();
    assert_eq!(none.known_registrars(), ["127.0.0.1".parse().unwrap()]);
    assert!(none.admits_registrar(&[local]));
    assert!(!none.admits_registrar(&["10.0.0.1:3863".parse().unwrap()]));
}

#[test]
fn what_is_written_is_heeded() {
    let text = r#"
[pool]
listen = ["10.0.0.1", "10.1.0.1"]
raw = false
encapsulation_port = 7000
registrars = ["10.0.0.2", "10.0.0.3:4000"]
life_unit = "seconds"
life_ms = 30000
update_interval_ms = 40
[access]
registrar = ["10.9.0.0/16"]
[multicast]
group = "239.0.0.60:3863"
interfaces = ["a0"]
[sctp]
init_retransmissions = 2
"#;
    let config = parse(text).unwrap();
    assert_eq!((config.listen.len(), config.raw), (2, false));
    assert_eq!(config.encapsulation, Encapsulation::Port(7000));
    let known = ["10.0.0.2:3863", "10.0.0.3:4000"].map(|at| at.parse::<RegistrarAt>().unwrap());
    assert_eq!(config.known_registrars(), known);
    assert!(config.admits_registrar(&["10.0.0.3:9".parse().unwrap()]));
    assert!(config.admits_registrar(&["10.9.1.1:9".parse().unwrap()]));
    assert!(!config.admits_registrar(&["10.8.1.1:9".parse().unwrap()]));
    assert_eq!(config.life_unit, LifeUnit::Seconds);
    assert_eq!(config.life, Duration::from_secs(30));
    assert_eq!(config.update_interval, Duration::from_millis(40));
    assert_eq!(config.announces.group, "239.0.0.60:3863".parse().unwrap());
    assert_eq!(config.failure.init_retransmissions, 2);
}

#[test]
fn announces_alone_are_enough() {
    let config = parse("[multicast]\nannounces = true\n").unwrap();
    assert!(config.known_registrars().is_empty());
    assert!(config.admits_registrar(&["10.8.1.1:9".parse().unwrap()]));
}

#[test]
fn a_registrar_over_tls_wants_certificates_and_is_none_over_sctp() {
    let tls = "[tls]\nca = \"ca.pem\"\ncert = \"/etc/web.pem\"\nkey = \"web.key\"\n";
    let one = "[pool]\nregistrars = [\"tls://r1@10.0.0.2\"]\n";
    let config = parse(&format!("{one}{tls}")).unwrap();
    let files = config.tls.as_ref().expect("certificates");
    assert_eq!(files.cert, Path::new("/etc/web.pem"));
    assert!(!config.admits_registrar(&["10.0.0.2:3863".parse().unwrap()]));
    assert!(refused(one).contains("no certificate"));
    let announced = format!("{one}{tls}[multicast]\nannounces = true\n");
    assert!(refused(&announced).contains("announces are believed"));
    let twice = "[pool]\nregistrars = [\"tcp://10.0.0.2\", \"tcp://10.0.0.2:3863\"]\n";
    assert!(refused(twice).contains("named twice"));
    let beside = "[pool]\nregistrars = [\"10.0.0.2\", \"tcp://10.0.0.2\"]\n";
    assert!(parse(beside).is_ok());
}

#[test]
fn what_cannot_be_is_refused_and_named() {
    let registrar = refused("[pool]\nregistrars = [\"here\"]\n");
    assert!(
        registrar.contains("pool.toml:2: pool.registrars"),
        "{registrar}"
    );
    assert!(refused("[pool]\nlisen = []\n").contains("lisen"));
    assert!(refused("[pool]\nlisten = []\n").contains("listen"));
    assert!(refused("[pool]\nregistrars = [\"::1\"]\n").contains("registrar"));
    assert!(refused("[pool]\nraw = false\nencapsulation = false\n").contains("neither"));
    assert!(refused("[access]\nregistrar = [\"10.0.0.0/33\"]\n").contains("access.registrar"));
    assert!(refused("[multicast]\ngroup = \"10.0.0.1:1\"\n").contains("multicast"));
    assert!(refused("[sctp]\npath_mtu = 10\n").contains("path_mtu"));
    assert!(refused("[pool]\nlife_ms = 0\n").contains("life"));
}
