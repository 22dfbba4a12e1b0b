"""The public data sets that polyeps knows: descriptions, files, checksums and official addresses.

Standard library only: the command line reads this without importing numpy or torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DataFile:
    """A published file; its checksum is that of the unpacked content, so recompressed copies are recognised."""

    path: str  # of the unpacked file, below a data folder
    sha256: str  # of the unpacked content; a file that is itself an archive (.tar.gz) is hashed as it is
    url: str  # of the file, its .gz, or an archive that holds it; empty when it is not published in this form
    member: str = ""  # its name in that archive

    @property
    def download(self) -> str:
        """Return the path of the downloaded file, below a data folder."""
        return f"{self.path.split('/')[0]}/{self.url.split('/')[-1]}"


@dataclass(frozen=True)
class PublicDataset:
    """Description and files of a public data set."""

    name: str
    title: str
    records: int
    test_records: int  # 0: no test split was published
    shape: tuple[int, ...]  # of one record
    classes: tuple[str, ...]
    licence: str
    origin: str
    files: tuple[DataFile, ...] = ()
    other_files: tuple[DataFile, ...] = ()  # a second form of the same data, used when `files` are not here
    download_mb: float = 0.0
    note: str = ""
    package: str = ""  # a command that installs it, where a package exists


_DIGITS = tuple("0123456789")
_CLOTHES = "T-shirt/top, Trouser, Pullover, Dress, Coat, Sandal, Shirt, Sneaker, Bag, Ankle boot"
_THINGS = "airplane, automobile, bird, cat, deer, dog, frog, horse, ship, truck"

_MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_FASHION_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_QMNIST_URL = "https://raw.githubusercontent.com/facebookresearch/qmnist/master/"
_UCI_URL = "https://archive.ics.uci.edu/ml/machine-learning-databases/"
_CIFAR_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"

_IDX_NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def _idx_files(folder: str, url: str, checksums: tuple[str, ...]) -> tuple[DataFile, ...]:
    return tuple(
        DataFile(f"{folder}/{name}", checksum, f"{url}{name}.gz")
        for name, checksum in zip(_IDX_NAMES, checksums, strict=True)
    )


def _cifar_file(name: str, checksum: str) -> DataFile:
    return DataFile(f"cifar10/{name}", checksum, _CIFAR_URL, member=f"cifar-10-batches-bin/{name}")


def _synthetic(name: str, which: str, records: int, size: int) -> PublicDataset:
    return PublicDataset(
        name=name,
        title=f"FedSel's synthetic data, {which}",
        records=records,
        test_records=0,
        shape=(size,),
        classes=("-1", "+1"),
        licence="made here",
        origin="generator of J. Wangni and others, NeurIPS 2018; FedSel's parameters",
        note="Made from a seed, of a run its own, with C1 = 0.01 (in the paper also 0.1) and C2 = 0.9 (also 0.6).",
    )


_MNIST_FILES = _idx_files(
    "mnist",
    _MNIST_URL,
    (
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
)

_ALL = (
    PublicDataset(
        name="digits",
        title="handwritten digits, 8 x 8 pixels",
        records=1500,
        test_records=297,
        shape=(1, 8, 8),
        classes=_DIGITS,
        licence="CC BY 4.0",
        origin="E. Alpaydin, C. Kaynak, UCI (doi 10.24432/C50P49); bundled with scikit-learn",
        note="The published order is kept: the first 1500 records train, the last 297 test.",
    ),
    PublicDataset(
        name="mnist",
        title="handwritten digits, 28 x 28 pixels",
        records=60_000,
        test_records=10_000,
        shape=(1, 28, 28),
        classes=_DIGITS,
        licence="CC BY-SA 3.0 (as stated)",
        origin="Y. LeCun, C. Cortes, C. Burges",
        files=_MNIST_FILES,
        download_mb=11.6,
    ),
    PublicDataset(
        name="fashion-mnist",
        title="articles of clothing, 28 x 28 pixels",
        records=60_000,
        test_records=10_000,
        shape=(1, 28, 28),
        classes=tuple(_CLOTHES.split(", ")),
        licence="MIT",
        origin="Zalando Research",
        files=_idx_files(
            "fashion-mnist",
            _FASHION_URL,
            (
                "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
                "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
                "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
                "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
            ),
        ),
        download_mb=30.9,
        package="apt-get install dataset-fashion-mnist",
    ),
    PublicDataset(
        name="cifar10",
        title="photographs of ten kinds of things, 32 x 32 pixels in colour",
        records=50_000,
        test_records=10_000,
        shape=(3, 32, 32),
        classes=tuple(_THINGS.split(", ")),
        licence="none stated",
        origin="A. Krizhevsky, 2009",
        files=(
            _cifar_file("data_batch_1.bin", "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
            _cifar_file("data_batch_2.bin", "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
            _cifar_file("data_batch_3.bin", "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
            _cifar_file("data_batch_4.bin", "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
            _cifar_file("data_batch_5.bin", "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
            _cifar_file("test_batch.bin", "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
        ),
        download_mb=170.1,
    ),
    PublicDataset(
        name="imdb",
        title="film reviews, positive or negative, as word numbers",
        records=25_000,
        test_records=25_000,
        shape=(256,),
        classes=("negative", "positive"),
        licence="none stated; free for research with citation, texts belong to their writers",
        origin="A. Maas and others, ACL 2011",
        files=(
            DataFile("imdb/imdb_train.csv", "472641589aac733166f2d99c199f795a0b50a70d1963ee510832916b074aa3ba", ""),
            DataFile("imdb/imdb_test.csv", "e22476f95a6725c53642092ade889eb87754731ad141dbb4d03242cb23b88ede", ""),
        ),
        other_files=(
            DataFile(
                "imdb/aclImdb_v1.tar.gz",
                "c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe",
                "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
            ),
        ),
        download_mb=84.1,
        note="Word numbers count down from the most frequent training word; 0 pads, 1 is any other word.",
    ),
    PublicDataset(
        name="adult",
        title="census records; does the person earn more than 50 000 dollars a year",
        records=32_561,
        test_records=16_281,
        shape=(123,),
        classes=("<=50K", ">50K"),
        licence="CC BY 4.0",
        origin="B. Becker, R. Kohavi, UCI (doi 10.24432/C5XW20)",
        files=(
            DataFile(
                "adult/adult.data",
                "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
                _UCI_URL + "adult/adult.data",
            ),
            DataFile(
                "adult/adult.test",
                "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
                _UCI_URL + "adult/adult.test",
            ),
        ),
        download_mb=6.0,
        note="Encoded as LIBSVM's a9a: 123 binary columns, continuous attributes by quintile.",
    ),
    PublicDataset(
        name="bank",
        title="telephone campaigns of a bank; did the customer subscribe",
        records=45_211,
        test_records=0,
        shape=(32,),
        classes=("no", "yes"),
        licence="CC BY 4.0",
        origin="S. Moro, P. Cortez, P. Rita, UCI (doi 10.24432/C5K306)",
        files=(
            DataFile(
                "bank/bank-full.csv",
                "d1513ec63b385506f7cfce9f2c5caa9fe99e7ba4e8c3fa264b3aaf0f849ed32d",
                _UCI_URL + "00222/bank.zip",
                member="bank-full.csv",
            ),
        ),
        download_mb=0.6,
        note="32 columns as in FedSel; how the paper reached 32 is our inference, see docs/reference/data-sets.md.",
    ),
    PublicDataset(
        name="kddcup99",
        title="network connections, normal or an attack (the 10 % file)",
        records=494_021,
        test_records=0,
        shape=(114,),
        classes=("normal", "attack"),
        licence="CC BY 4.0",
        origin="S. Stolfo and others, UCI (doi 10.24432/C51C7N)",
        files=(
            DataFile(
                "kddcup99/kddcup.data_10_percent",
                "f8c8267ebcd9c0ed1fd7d6277fe5bfff8732e9b7db8e61b873542b2a534b6f9a",
                _UCI_URL + "kddcup99-mld/kddcup.data_10_percent.gz",
            ),
        ),
        download_mb=2.1,
        note="FedSel uses 70 000 records and 114 columns; our columns: docs/reference/data-sets.md.",
    ),
    PublicDataset(
        name="mnist-writers",
        title="MNIST with the writer of every digit: a natural federation of 539 clients",
        records=60_000,
        test_records=10_000,
        shape=(1, 28, 28),
        classes=_DIGITS,
        licence="BSD-style (writer ids), CC BY-SA 3.0 (MNIST)",
        origin="C. Yadav, L. Bottou, NeurIPS 2019 (QMNIST)",
        files=(
            *_MNIST_FILES,
            DataFile(
                "mnist-writers/qmnist-train-labels-idx2-int",
                "bb1b6e1ec7b04fd5696f1ed50b5f58f8ef195118edd5c93c81783df9740b8ac5",
                _QMNIST_URL + "qmnist-train-labels-idx2-int.gz",
            ),
            DataFile(
                "mnist-writers/qmnist-test-labels-idx2-int",
                "92d0ccb8c25f9c6534270fb4be7e1d24a1c6d315edfc8a638bfbd31c70f362dd",
                _QMNIST_URL + "qmnist-test-labels-idx2-int.gz",
            ),
        ),
        download_mb=12.6,
        note="No writer is in both splits. Stands in for digits-only FEMNIST.",
    ),
    _synthetic("syn-l", "low dimension", 60_000, 100),
    _synthetic("syn-h", "high dimension", 100_000, 300),
)

PUBLIC_DATASETS: dict[str, PublicDataset] = {published.name: published for published in _ALL}
