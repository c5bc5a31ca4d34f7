//! Parameters and FLOPs of every row of `SPEC-vision.md` section 7, to the integer.

use super::cvt::{Cvt, CvtConfig};
use super::resnet::{ResNet, ResNetConfig};
use super::vil::{Vil, VilConfig};
use super::vit::{Vit, VitConfig};
use super::*;

fn count(build: impl FnOnce(&ParamBuilder) -> Result<()>) -> usize {
    let counting = ParamBuilder::counting();
    build(&counting).unwrap();
    counting.finish().count()
}

fn check(name: &str, parameters: usize, flops: Flops, want: (usize, u64, u64, u64)) {
    let got = (parameters, flops.macs, flops.total(false), flops.total(true));
    assert_eq!(got, want, "{name}");
}

#[test]
fn vil_ls() {
    for (name, size, w, depth, want) in [
        ("Medium 224", 224, 7, [4, 16], (39_799_423, 8_687_914_176, 8_721_554_496)),
        ("Base 224", 224, 7, [8, 24], (55_834_363, 13_343_120_064, 13_394_931_264)),
        ("Medium 384", 384, 8, [4, 16], (39_947_653, 28_644_220_608, 28_742_795_328)),
    ] {
        let config = VilConfig::published(size, w, depth);
        let parameters = count(|builder| Vil::new(&config, builder).map(drop));
        check(name, parameters, config.flops(), (want.0, want.1, want.2, want.2));
    }
}

#[test]
fn cvt_and_cvt_ls() {
    let (small, medium, large) = (Some([8, 4, 2]), Some([12, 6, 3]), Some([16, 8, 4]));
    for (size, depth, windows, want) in [
        (224, [2, 10], None, (20_006_184, 6_625_805_824, 6_648_049_024, 6_659_338_624)),
        (224, [4, 16], None, (31_639_464, 10_079_509_504, 10_113_817_984, 10_131_881_344)),
        (384, [2, 10], None, (20_006_184, 30_988_122_624, 31_053_412_224, 31_086_589_824)),
        (384, [4, 16], None, (31_639_464, 44_820_532_224, 44_921_234_304, 44_974_318_464)),
        (224, [2, 10], small, (20_279_160, 4_885_802_496, 4_923_515_776, 4_938_568_576)),
        (224, [4, 16], small, (32_084_856, 7_819_582_464, 7_878_661_504, 7_902_745_984)),
        (384, [4, 16], medium, (32_084_856, 23_662_365_696, 23_834_532_736, 23_905_311_616)),
        (448, [4, 16], large, (32_084_856, 33_833_831_424, 34_067_899_264, 34_164_237_184)),
    ] {
        let config = CvtConfig::published(size, depth, windows);
        let parameters = count(|builder| Cvt::new(&config, builder).map(drop));
        check(&format!("{size} {depth:?} {windows:?}"), parameters, config.flops(), want);
    }
}

#[test]
fn vit_and_resnet() {
    for (size, width, heads, depth, want) in [
        (224, 384, 6, 12, (22_050_664, 4_598_882_304, 4_608_338_304)),
        (224, 768, 12, 12, (86_567_656, 17_563_828_224, 17_582_740_224)),
        (384, 768, 12, 12, (86_859_496, 55_484_350_464, 55_539_742_464)),
        (384, 1024, 16, 24, (304_715_752, 191_066_300_416, 191_211_058_176)),
    ] {
        let config = VitConfig { size, patch: 16, width, heads, depth, classes: 1000 };
        let parameters = count(|builder| Vit::new(&config, builder).map(drop));
        check(&format!("{size} {width}"), parameters, config.flops(), (want.0, want.1, want.2, want.2));
    }
    let config = ResNetConfig::resnet_50(224);
    let parameters = count(|builder| ResNet::new(&config, builder).map(drop));
    check("ResNet-50", parameters, config.flops(), (25_557_032, 4_089_184_256, 4_111_412_224, 4_144_754_176));
}
